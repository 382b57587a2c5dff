// Python objects in C++, through CPython's limited API of 3.10: one binary works with every Python from 3.10 on. A
// library that is bound to one Python anyway, because it includes PyTorch's headers, is compiled with FASTFORMER_BOUND.
//
// A function is bound with the Python names of its arguments; "?" marks optional ones:
//   method<"step", "tokens k threads?", &step>()
// The types of the parameters determine which arguments are accepted; see Cast. Conversions are strict: a float is not
// an integer, an integer that doesn't fit is refused, and a wrong type is a TypeError that names the function and the
// argument.

#pragma once

#ifndef FASTFORMER_BOUND
#define Py_LIMITED_API 0x030A0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <array>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace fastformer::python {

// Thrown when a Python exception is already set.
struct Raised {};

// A reference to a Python object that this C++ object owns.
class Object {
 public:
  Object() = default;
  explicit Object(PyObject* owned) : owned_(owned) {}
  static Object borrowed(PyObject* object) {
    Py_XINCREF(object);
    return Object(object);
  }
  Object(Object&& other) noexcept : owned_(std::exchange(other.owned_, nullptr)) {}
  Object& operator=(Object&& other) noexcept {
    std::swap(owned_, other.owned_);
    return *this;
  }
  ~Object() { Py_XDECREF(owned_); }
  PyObject* get() const { return owned_; }
  PyObject* release() { return std::exchange(owned_, nullptr); }
  explicit operator bool() const { return owned_ != nullptr; }

 private:
  PyObject* owned_ = nullptr;
};

inline PyObject* sure(PyObject* object) {
  if (object == nullptr) throw Raised{};
  return object;
}

// Releases the GIL during its lifetime.
class Released {
 public:
  Released() : state_(PyEval_SaveThread()) {}
  ~Released() { PyEval_RestoreThread(state_); }
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;

 private:
  PyThreadState* state_;
};

// Sets the Python exception that corresponds to the C++ exception being handled.
void set_error() noexcept;

// Thrown for a wrong argument, with a description of what was expected. The code that calls Cast adds the argument's
// name.
struct Unexpected {
  const char* wanted;
};

// ---- conversions from Python ----

template <typename T>
struct Cast;

template <>
struct Cast<PyObject*> {
  static PyObject* from(PyObject* object) { return object; }
};

template <>
struct Cast<int64_t> {
  static int64_t from(PyObject* object);
};

template <>
struct Cast<int32_t> {
  static int32_t from(PyObject* object) {
    const int64_t value = Cast<int64_t>::from(object);
    if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max())
      throw Unexpected{"a 32-bit integer"};
    return static_cast<int32_t>(value);
  }
};

template <>
struct Cast<double> {
  static double from(PyObject* object);
};

template <>
struct Cast<float> {
  static float from(PyObject* object) { return static_cast<float>(Cast<double>::from(object)); }
};

template <>
struct Cast<bool> {
  static bool from(PyObject* object);
};

template <>
struct Cast<std::string> {
  static std::string from(PyObject* object);
};

// None becomes an empty optional.
template <typename T>
struct Cast<std::optional<T>> {
  static std::optional<T> from(PyObject* object) {
    if (object == nullptr || object == Py_None) return std::nullopt;
    return Cast<T>::from(object);
  }
};

// Returns the object itself if it is a list, else a list of the elements of the sequence.
Object as_list(PyObject* sequence);

template <typename T>
struct Cast<std::vector<T>> {
  static std::vector<T> from(PyObject* sequence) {
    const Object list = as_list(sequence);
    std::vector<T> values;
    const Py_ssize_t size = PyList_Size(list.get());
    values.reserve(static_cast<size_t>(size));
    // A method of an element may change the list, so the size is read in each iteration, and the element is kept alive.
    for (Py_ssize_t i = 0; i < PyList_Size(list.get()); ++i) {
      PyObject* const item = sure(PyList_GetItem(list.get(), i));
      const Object held = PyLong_CheckExact(item) ? Object() : Object::borrowed(item);
      values.push_back(Cast<T>::from(item));
    }
    return values;
  }
};

template <typename... T>
struct Cast<std::tuple<T...>> {
  static std::tuple<T...> from(PyObject* object) {
    if (!PyTuple_Check(object) || PyTuple_Size(object) != static_cast<Py_ssize_t>(sizeof...(T)))
      throw Unexpected{"tuples of a different size"};
    return each(object, std::index_sequence_for<T...>());
  }
  template <size_t... I>
  static std::tuple<T...> each(PyObject* object, std::index_sequence<I...>) {
    return {Cast<T>::from(sure(PyTuple_GetItem(object, I)))...};
  }
};

// ---- conversions to Python ----

inline Object to_python(Object&& object) { return std::move(object); }
inline Object to_python(bool value) { return Object::borrowed(value ? Py_True : Py_False); }
inline Object to_python(int32_t value) { return Object(sure(PyLong_FromLong(value))); }
inline Object to_python(int64_t value) { return Object(sure(PyLong_FromLongLong(value))); }
inline Object to_python(uint64_t value) { return Object(sure(PyLong_FromUnsignedLongLong(value))); }
inline Object to_python(double value) { return Object(sure(PyFloat_FromDouble(value))); }
inline Object to_python(float value) { return Object(sure(PyFloat_FromDouble(value))); }
inline Object to_python(const std::string& text) {
  return Object(sure(PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()))));
}
template <typename... T>
Object make_tuple(T&&... values);
template <typename A, typename B>
Object to_python(const std::pair<A, B>& pair) {
  return python::make_tuple(pair.first, pair.second);
}
template <typename T>
Object to_python(const std::vector<T>& values) {
  Object list(sure(PyList_New(static_cast<Py_ssize_t>(values.size()))));
  for (size_t i = 0; i < values.size(); ++i) {
    Object item = to_python(static_cast<const T&>(values[i]));
    PyList_SetItem(list.get(), static_cast<Py_ssize_t>(i), item.release());
  }
  return list;
}
template <typename... T>
Object make_tuple(T&&... values) {
  Object tuple(sure(PyTuple_New(sizeof...(T))));
  Py_ssize_t at = 0;
  const auto put = [&](Object&& item) { PyTuple_SetItem(tuple.get(), at++, item.release()); };
  (put(to_python(std::forward<T>(values))), ...);
  return tuple;
}

// ---- instances of bound classes ----

// An instance of a bound class: its C++ object, and the list of weak references to it.
struct Instance {
  PyObject_HEAD;
  PyObject* weak_references;
  void* object;
};

template <typename Self>
Self& self_of(PyObject* instance) {
  return *static_cast<Self*>(reinterpret_cast<Instance*>(instance)->object);
}

// The Python class for a C++ class; set by `add_class`.
template <typename T>
inline PyTypeObject* type_of = nullptr;

PyObject* new_instance(PyTypeObject* type);

// Transfers ownership to Python.
template <typename T>
Object wrapped(std::unique_ptr<T> object) {
  Object instance(sure(new_instance(type_of<T>)));
  reinterpret_cast<Instance*>(instance.get())->object = object.release();
  return instance;
}
template <typename T>
Object to_python(std::unique_ptr<T>&& object) {
  return wrapped(std::move(object));
}

// Converts an instance to a pointer to its C++ object, and None to null.
template <typename T>
struct Cast<T*> {
  static T* from(PyObject* object) {
    if (object == Py_None) return nullptr;
    if (!PyObject_TypeCheck(object, type_of<std::remove_const_t<T>>))
      throw Unexpected{"an object of a different class"};
    return &self_of<std::remove_const_t<T>>(object);
  }
};

// ---- functions ----

template <size_t N>
struct Text {
  char text[N];
  constexpr Text(const char (&from)[N]) {
    for (size_t i = 0; i < N; ++i) text[i] = from[i];
  }
};

// The names of a function's parameters.
class Signature {
 public:
  Signature(const char* function, const char* names);
  // Assigns the arguments of a call to the parameters; null: omitted. Throws Raised with a TypeError.
  void place(PyObject* const* args, Py_ssize_t count, PyObject* keywords, PyObject** placed) const;
  [[noreturn]] void refuse(size_t parameter, PyObject* given, const Unexpected& why) const;
  size_t size() const { return names_.size(); }

 private:
  const char* function_;
  std::vector<std::string> names_;
  size_t required_ = 0;
};

template <typename T>
std::decay_t<T> argument(const Signature& signature, size_t parameter, PyObject* given) {
  try {
    return Cast<std::decay_t<T>>::from(given);
  } catch (const Unexpected& why) {
    signature.refuse(parameter, given, why);
  }
}

template <auto F, typename Function = decltype(F)>
struct Call;

template <auto F, typename R, typename... A>
struct Call<F, R (*)(A...)> {
  template <size_t... I>
  static Object run(const Signature& signature, PyObject* const* placed, std::index_sequence<I...>) {
    if constexpr (std::is_void_v<R>) {
      F(argument<A>(signature, I, placed[I])...);
      return Object::borrowed(Py_None);
    } else {
      return to_python(F(argument<A>(signature, I, placed[I])...));
    }
  }
  static Object plain(const Signature& signature, PyObject*, PyObject* const* placed) {
    return run(signature, placed, std::index_sequence_for<A...>());
  }
  static constexpr size_t kParameters = sizeof...(A);
};

template <auto F, typename Function = decltype(F)>
struct MethodCall;

template <auto F, typename R, typename Self, typename... A>
struct MethodCall<F, R (*)(Self&, A...)> {
  template <size_t... I>
  static Object run(const Signature& signature, PyObject* self, PyObject* const* placed, std::index_sequence<I...>) {
    if constexpr (std::is_void_v<R>) {
      F(self_of<Self>(self), argument<A>(signature, I, placed[I])...);
      return Object::borrowed(Py_None);
    } else {
      return to_python(F(self_of<Self>(self), argument<A>(signature, I, placed[I])...));
    }
  }
  static Object plain(const Signature& signature, PyObject* self, PyObject* const* placed) {
    return run(signature, self, placed, std::index_sequence_for<A...>());
  }
  static constexpr size_t kParameters = sizeof...(A);
};

template <typename Called, Text name, Text names>
PyObject* entry(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) noexcept {
  try {
    static const Signature signature(name.text, names.text);
    std::array<PyObject*, Called::kParameters + 1> placed{};
    signature.place(args, count, keywords, placed.data());
    return Called::plain(signature, self, placed.data()).release();
  } catch (...) {
    set_error();
    return nullptr;
  }
}

// F is a function without overloads, or a lambda without captures, converted to a function pointer by a unary +.
template <Text name, Text names, auto F>
PyMethodDef function(const char* doc = nullptr) {
  const auto called = &entry<Call<F>, name, names>;
  return {name.text, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(called)), METH_FASTCALL | METH_KEYWORDS,
          doc};
}

// Binds a method; the first parameter of F is the C++ object.
template <Text name, Text names, auto F>
PyMethodDef method() {
  const auto called = &entry<MethodCall<F>, name, names>;
  return {name.text, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(called)), METH_FASTCALL | METH_KEYWORDS,
          nullptr};
}

template <auto F, typename Function = decltype(F)>
struct Getter;
template <auto F, typename R, typename Self>
struct Getter<F, R (*)(const Self&)> {
  static PyObject* get(PyObject* self, void*) noexcept {
    try {
      return to_python(F(self_of<Self>(self))).release();
    } catch (...) {
      set_error();
      return nullptr;
    }
  }
};

template <auto F>
PyGetSetDef property(const char* name) {
  return {name, &Getter<F>::get, nullptr, nullptr, nullptr};
}

// ---- classes ----

template <typename T>
void destroy(PyObject* self) {
  auto* const instance = reinterpret_cast<Instance*>(self);
  PyTypeObject* const type = Py_TYPE(self);
  if (instance->weak_references != nullptr) PyObject_ClearWeakRefs(self);
  delete static_cast<T*>(instance->object);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyObject* call_constructor(PyObject* args, PyObject* keywords,
                           PyObject* (*entry)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*));

template <auto Make, Text name, Text names>
PyObject* construct(PyTypeObject*, PyObject* args, PyObject* keywords) {
  return call_constructor(args, keywords, &entry<Call<Make>, name, names>);
}

// Adds a class to the module. `made`: see `construct`; if it is null, Python code can't create instances.
void add_type(PyObject* module, const char* name, PyTypeObject** type, destructor destroyed, newfunc made,
              PyMethodDef* methods, PyGetSetDef* properties);

template <typename T>
void add_class(PyObject* module, const char* name, newfunc made, PyMethodDef* methods, PyGetSetDef* properties) {
  add_type(module, name, &type_of<T>, &destroy<T>, made, methods, properties);
}

// Adds functions to the module. The last element of the array is empty, and the array has to outlive the module.
void add_functions(PyObject* module, PyMethodDef* functions);

}  // namespace fastformer::python

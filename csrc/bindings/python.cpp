#include "bindings/python.h"

#include <structmember.h>

namespace fastformer::python {

void set_error() noexcept {
  try {
    throw;
  } catch (const Raised&) {
    if (PyErr_Occurred() == nullptr)
      PyErr_SetString(PyExc_SystemError, "a function failed without setting an exception");
  } catch (const Unexpected& why) {
    PyErr_Format(PyExc_TypeError, "expected %s", why.wanted);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::out_of_range& error) {
    PyErr_SetString(PyExc_IndexError, error.what());
  } catch (const std::logic_error& error) {  // the caller's error: invalid_argument, length_error, domain_error
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::overflow_error& error) {
    PyErr_SetString(PyExc_OverflowError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "an exception of unknown type");
  }
}

int64_t Cast<int64_t>::from(PyObject* object) {
  Object index;
  if (!PyLong_Check(object)) {
    if (!PyIndex_Check(object)) throw Unexpected{"an integer"};
    index = Object(sure(PyNumber_Index(object)));
    object = index.get();
  }
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (overflow != 0) throw Unexpected{"a 64-bit integer"};
  if (value == -1 && PyErr_Occurred() != nullptr) throw Raised{};
  return value;
}

double Cast<double>::from(PyObject* object) {
  if (!PyFloat_Check(object) && !PyNumber_Check(object)) throw Unexpected{"a number"};
  const double value = PyFloat_AsDouble(object);
  if (value == -1.0 && PyErr_Occurred() != nullptr) throw Raised{};
  return value;
}

bool Cast<bool>::from(PyObject* object) {
  if (object == Py_True || object == Py_False) return object == Py_True;
  if (object == Py_None || !PyNumber_Check(object)) throw Unexpected{"a bool"};
  const int truth = PyObject_IsTrue(object);
  if (truth < 0) throw Raised{};
  return truth == 1;
}

std::string Cast<std::string>::from(PyObject* object) {
  if (!PyUnicode_Check(object)) throw Unexpected{"a string"};
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object, &size);
  if (text == nullptr) throw Raised{};
  return {text, static_cast<size_t>(size)};
}

Object as_list(PyObject* sequence) {
  if (PyList_Check(sequence)) return Object::borrowed(sequence);
  if (!PySequence_Check(sequence) || PyUnicode_Check(sequence) || PyBytes_Check(sequence))
    throw Unexpected{"a sequence"};
  return Object(sure(PySequence_List(sequence)));
}

Signature::Signature(const char* function, const char* names) : function_(function) {
  std::string_view rest = names;
  while (!rest.empty()) {
    const size_t end = std::min(rest.find(' '), rest.size());
    std::string_view name = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (name.back() == '?') name.remove_suffix(1);
    else required_ = names_.size() + 1;
    names_.emplace_back(name);
  }
}

void Signature::place(PyObject* const* args, Py_ssize_t count, PyObject* keywords, PyObject** placed) const {
  if (count > static_cast<Py_ssize_t>(names_.size())) {
    PyErr_Format(PyExc_TypeError, "%s(): expected at most %zu arguments, got %zd", function_, names_.size(), count);
    throw Raised{};
  }
  for (Py_ssize_t i = 0; i < count; ++i) placed[i] = args[i];
  const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_Size(keywords);
  for (Py_ssize_t i = 0; i < named; ++i) {
    const std::string keyword = Cast<std::string>::from(PyTuple_GetItem(keywords, i));
    size_t at = 0;
    while (at < names_.size() && names_[at] != keyword) ++at;
    if (at == names_.size() || placed[at] != nullptr) {
      PyErr_Format(PyExc_TypeError, "%s(): %s argument '%s'", function_,
                   at == names_.size() ? "there is no" : "two values for the", keyword.c_str());
      throw Raised{};
    }
    placed[at] = args[count + i];
  }
  for (size_t i = 0; i < required_; ++i)
    if (placed[i] == nullptr) {
      PyErr_Format(PyExc_TypeError, "%s(): missing argument '%s'", function_, names_[i].c_str());
      throw Raised{};
    }
}

void Signature::refuse(size_t parameter, PyObject* given, const Unexpected& why) const {
  const Object type(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(given)), "__name__"));
  PyErr_Clear();
  PyErr_Format(PyExc_TypeError, "%s(): expected %s for '%s', got a value of type %U", function_, why.wanted,
               names_[parameter].c_str(), type.get());
  throw Raised{};
}

PyObject* new_instance(PyTypeObject* type) {
  const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  return allocate(type, 0);
}

PyObject* call_constructor(PyObject* args, PyObject* keywords,
                           PyObject* (*entry)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*)) {
  std::vector<PyObject*> values;
  for (Py_ssize_t i = 0; i < PyTuple_Size(args); ++i) values.push_back(PyTuple_GetItem(args, i));
  Object names;
  if (keywords != nullptr && PyDict_Size(keywords) > 0) {
    names = Object(PyTuple_New(PyDict_Size(keywords)));
    if (!names) return nullptr;
    Py_ssize_t at = 0, next = 0;
    PyObject *name = nullptr, *value = nullptr;
    while (PyDict_Next(keywords, &next, &name, &value)) {
      PyTuple_SetItem(names.get(), at++, Object::borrowed(name).release());
      values.push_back(value);
    }
  }
  return entry(nullptr, values.data(), PyTuple_Size(args), names.get());
}

namespace {

PyObject* not_made(PyTypeObject*, PyObject*, PyObject*) {
  PyErr_SetString(PyExc_TypeError, "functions of the module make objects of this class; Python code can't");
  return nullptr;
}

}  // namespace

void add_type(PyObject* module, const char* name, PyTypeObject** type, destructor destroyed, newfunc made,
              PyMethodDef* methods, PyGetSetDef* properties) {
  static PyMemberDef members[] = {
      {"__weaklistoffset__", T_PYSSIZET, offsetof(Instance, weak_references), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(destroyed)},
                         {Py_tp_new, reinterpret_cast<void*>(made != nullptr ? made : &not_made)},
                         {Py_tp_methods, methods},
                         {Py_tp_members, members},
                         {Py_tp_getset, properties},
                         {0, nullptr}};
  const Object path(sure(PyObject_GetAttrString(module, "__name__")));
  // The type refers to the name, so it is never freed.
  const auto* full = new std::string(Cast<std::string>::from(path.get()) + "." + name);
  PyType_Spec spec{full->c_str(), sizeof(Instance), 0, Py_TPFLAGS_DEFAULT, slots};
  PyObject* const created = sure(PyType_FromSpec(&spec));
  *type = reinterpret_cast<PyTypeObject*>(created);  // never released: instances may outlive the module
  Py_INCREF(created);
  if (PyModule_AddObject(module, name, created) != 0) throw Raised{};
}

void add_functions(PyObject* module, PyMethodDef* functions) {
  if (PyModule_AddFunctions(module, functions) != 0) throw Raised{};
}

}  // namespace fastformer::python

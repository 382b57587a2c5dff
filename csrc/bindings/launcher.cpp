// Launches kernels through the CUDA driver, which is loaded at run time: building needs no CUDA toolkit, and running no
// Triton.
//
// A kernel is a function of a loaded cubin and the layout of its parameters, written as a string:
//
//   p            a pointer: a tensor (its data_ptr()), an address or None
//   b h i q      an integer of 1, 2, 4 or 8 bytes; Q is unsigned
//   f d          a float of 4 or 8 bytes
//   n            an argument that is a constant in the kernel; it is skipped
//   ( )          a tuple of these
//   T            a Triton tensor descriptor: a tensor map of 128 bytes, then its sizes as i and its strides as q
//   0            a pointer that no kernel here reads: to Triton's scratch memory, which none of them requests
//
// Only Python's limited API and the driver's ABI are used. The bytes of the parameters are the same as those of
// Triton's own launcher (tests/kernels/test_ahead_of_time.py checks this).

#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "bindings/module.h"

namespace fastformer {
namespace {

using python::Object;
using Result = int;  // CUresult: 0 is success

constexpr Result kInvalidValue = 1;
constexpr int kPointerDevice = 3;           // CU_POINTER_ATTRIBUTE_DEVICE_POINTER
constexpr int kSharedOptIn = 97;            // CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
constexpr int kMaxThreads = 0;              // CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
constexpr int kStaticShared = 1;            // CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
constexpr int kMaxDynamicShared = 8;        // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kPreferShared = 1;            // CU_FUNC_CACHE_PREFER_SHARED
constexpr int kPromotion128 = 2;            // CU_TENSOR_MAP_L2_PROMOTION_L2_128B
constexpr unsigned kDefaultShared = 49152;  // bytes that a function may use without opting in
constexpr int kMaxValues = 160, kMaxMaps = 8, kMaxRank = 5;

// CUlaunchConfig
struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared;
  void* stream;
  void* attributes;
  unsigned num_attributes;
};

// CUtensorMap
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

struct Driver {
  Result (*get_error_string)(Result, const char**);
  Result (*get_context)(void**);
  Result (*set_context)(void*);
  Result (*retain_context)(void**, int);
  Result (*device_attribute)(int*, int, int);
  Result (*load_module)(void**, const void*);
  Result (*get_function)(void**, void*, const char*);
  Result (*function_attribute)(int*, int, void*);
  Result (*set_function_attribute)(void*, int, int);
  Result (*set_cache_config)(void*, int);
  Result (*pointer_attribute)(void*, int, uint64_t);
  Result (*encode_tiled)(TensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                         const uint32_t*, int, int, int, int);
  Result (*launch)(const LaunchConfig*, void*, void**, void**);
};

// The driver, or null with a Python exception set.
const Driver* driver() {
  static Driver driver;
  static bool is_loaded = false;  // the GIL is held
  if (is_loaded) return &driver;
  void* const library = dlopen("libcuda.so.1", RTLD_LAZY);
  if (library == nullptr) {
    PyErr_Format(PyExc_RuntimeError, "cannot load NVIDIA's driver: %s", dlerror());
    return nullptr;
  }
  const auto take = [library](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) PyErr_Format(PyExc_RuntimeError, "NVIDIA's driver is too old: it has no %s", name);
    return function != nullptr;
  };
  is_loaded = take(driver.get_error_string, "cuGetErrorString") && take(driver.get_context, "cuCtxGetCurrent") &&
              take(driver.set_context, "cuCtxSetCurrent") && take(driver.retain_context, "cuDevicePrimaryCtxRetain") &&
              take(driver.device_attribute, "cuDeviceGetAttribute") && take(driver.load_module, "cuModuleLoadData") &&
              take(driver.get_function, "cuModuleGetFunction") &&
              take(driver.function_attribute, "cuFuncGetAttribute") &&
              take(driver.set_function_attribute, "cuFuncSetAttribute") &&
              take(driver.set_cache_config, "cuFuncSetCacheConfig") &&
              take(driver.pointer_attribute, "cuPointerGetAttribute") &&
              take(driver.encode_tiled, "cuTensorMapEncodeTiled") && take(driver.launch, "cuLaunchKernelEx");
  return is_loaded ? &driver : nullptr;
}

// Returns whether a driver call succeeded. If not, a Python exception is set.
bool is_well(const Driver& cuda, Result result, const char* what) {
  if (result == 0) return true;
  const char* text = nullptr;
  cuda.get_error_string(result, &text);
  PyErr_Format(PyExc_RuntimeError, "%s: CUDA error %d, %s", what, result, text == nullptr ? "unknown" : text);
  return false;
}

// Makes the device's context current in this thread, if it has none.
bool enter_context(const Driver& cuda, int device) {
  void* context = nullptr;
  if (!is_well(cuda, cuda.get_context(&context), "cuCtxGetCurrent")) return false;
  if (context != nullptr) return true;
  return is_well(cuda, cuda.retain_context(&context, device), "cuDevicePrimaryCtxRetain") &&
         is_well(cuda, cuda.set_context(context), "cuCtxSetCurrent");
}

// The part of a tensor map that its descriptor doesn't contain.
struct MapRecipe {
  int swizzle, element_bytes, element_type, rank;
  uint32_t box[kMaxRank];  // the innermost dimension first
  PyObject* key;           // the key under which descriptors cache their parameters
};

// The cached parameters of a descriptor.
struct Encoded {
  TensorMap map;
  int32_t sizes[kMaxRank];
  int64_t strides[kMaxRank];
};

struct Kernel {
  void* function;
  unsigned threads, shared;
  int device;
  std::string layout;
  std::vector<MapRecipe> maps;
};

// Interned attribute names.
struct Names {
  PyObject *data_ptr, *base, *shape, *strides, *padding, *encoded;
};
const Names& names() {
  static const Names all = {PyUnicode_InternFromString("data_ptr"), PyUnicode_InternFromString("base"),
                            PyUnicode_InternFromString("shape"),    PyUnicode_InternFromString("strides"),
                            PyUnicode_InternFromString("padding"),  PyUnicode_InternFromString("encoded")};
  return all;
}

// Gets the address of an argument. Returns false with a Python exception set on failure.
bool address_of(PyObject* argument, uint64_t* address) {
  *address = 0;
  if (argument == Py_None) return true;
  const Object number = PyLong_Check(argument)
                            ? Object::borrowed(argument)
                            : Object(PyObject_CallMethodObjArgs(argument, names().data_ptr, nullptr));
  if (!number) return false;
  *address = PyLong_AsUnsignedLongLong(number.get());
  return !(*address == static_cast<uint64_t>(-1) && PyErr_Occurred());
}

// Reads the integers of a sequence in reverse order.
template <class T>
bool read_backwards(PyObject* sequence, int rank, T* into) {
  if (PySequence_Size(sequence) != rank) {
    if (!PyErr_Occurred())
      PyErr_SetString(PyExc_ValueError, "expected a descriptor of the rank for which the kernel was compiled");
    return false;
  }
  for (int i = 0; i < rank; ++i) {
    const Object item(PySequence_GetItem(sequence, i));
    if (!item) return false;
    into[rank - 1 - i] = static_cast<T>(PyLong_AsLongLong(item.get()));
    if (PyErr_Occurred()) return false;
  }
  return true;
}

// Reads the integers of an attribute, like `read_backwards`.
template <class T>
bool read_attribute(PyObject* object, PyObject* name, int rank, T* into) {
  const Object sequence(PyObject_GetAttr(object, name));
  return sequence && read_backwards(sequence.get(), rank, into);
}

bool encode(const Driver& cuda, PyObject* descriptor, const MapRecipe& recipe, Encoded* into) {
  const int rank = recipe.rank;
  int64_t sizes[kMaxRank], strides[kMaxRank];
  if (!read_attribute(descriptor, names().shape, rank, sizes)) return false;
  if (!read_attribute(descriptor, names().strides, rank, strides)) return false;
  uint64_t address = 0;
  const Object base(PyObject_GetAttr(descriptor, names().base));
  if (!base || !address_of(base.get(), &address)) return false;
  const Object padding(PyObject_GetAttr(descriptor, names().padding));
  if (!padding) return false;
  const bool is_zero = PyUnicode_CompareWithASCIIString(padding.get(), "zero") == 0;
  uint64_t extents[kMaxRank], bytes[kMaxRank];
  uint32_t element_strides[kMaxRank];
  for (int i = 0; i < rank; ++i) {
    extents[i] = static_cast<uint64_t>(sizes[i]);
    element_strides[i] = 1;
    if (i + 1 < rank) bytes[i] = static_cast<uint64_t>(strides[i + 1]) * static_cast<uint64_t>(recipe.element_bytes);
    into->sizes[rank - 1 - i] = static_cast<int32_t>(sizes[i]);
    into->strides[rank - 1 - i] = strides[i];
  }
  const Result result =
      cuda.encode_tiled(&into->map, recipe.element_type, static_cast<uint32_t>(rank), reinterpret_cast<void*>(address),
                        extents, bytes, recipe.box, element_strides, 0, recipe.swizzle, kPromotion128, is_zero ? 0 : 1);
  return is_well(cuda, result, "cuTensorMapEncodeTiled");
}

// Gets the parameters of a descriptor. A descriptor with a dictionary `encoded` caches them there, because its address
// never changes.
bool parameters_of(const Driver& cuda, PyObject* descriptor, const MapRecipe& recipe, Encoded* into) {
  const Object encoded_maps(PyObject_GetAttr(descriptor, names().encoded));
  if (!encoded_maps) {
    PyErr_Clear();
    return encode(cuda, descriptor, recipe, into);
  }
  if (PyObject* const known = PyDict_GetItemWithError(encoded_maps.get(), recipe.key)) {
    std::memcpy(into, PyBytes_AsString(known), sizeof *into);
    return true;
  }
  if (PyErr_Occurred() || !encode(cuda, descriptor, recipe, into)) return false;
  const Object bytes(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(into), sizeof *into));
  return bytes && PyDict_SetItem(encoded_maps.get(), recipe.key, bytes.get()) == 0;
}

// The parameters of one launch, and the driver's pointers to them.
struct Parameters {
  uint64_t values[kMaxValues];
  Encoded maps[kMaxMaps];
  void* places[kMaxValues];
  int num_values = 0, num_maps = 0, num_places = 0;

  bool add(uint64_t value) {
    if (num_values == kMaxValues || !point_at(&values[num_values])) return false;
    values[num_values++] = value;
    return true;
  }
  bool point_at(void* place) {
    if (num_places == kMaxValues) {
      PyErr_SetString(PyExc_ValueError, "expected fewer parameters");
      return false;
    }
    places[num_places++] = place;
    return true;
  }
};

bool add_pointer(const Driver& cuda, PyObject* argument, Parameters& parameters) {
  uint64_t address = 0;
  if (!address_of(argument, &address)) return false;
  if (address != 0) {
    uint64_t on_device = 0;
    const Result result = cuda.pointer_attribute(&on_device, kPointerDevice, address);
    if (result == kInvalidValue) {
      PyErr_SetString(PyExc_ValueError, "expected all tensors of a kernel on its GPU, got one on the CPU");
      return false;
    }
    if (!is_well(cuda, result, "cuPointerGetAttribute")) return false;
    address = on_device;
  }
  return parameters.add(address);
}

bool add_integer(PyObject* argument, char kind, Parameters& parameters) {
  if (kind == 'Q') {
    const unsigned long long value = PyLong_AsUnsignedLongLong(argument);
    return !(value == static_cast<unsigned long long>(-1) && PyErr_Occurred()) && parameters.add(value);
  }
  const long long value = PyLong_AsLongLong(argument);
  if (value == -1 && PyErr_Occurred()) return false;
  const int bits = kind == 'b' ? 8 : kind == 'h' ? 16 : kind == 'i' ? 32 : 64;
  if (bits < 64 && (value < -(1LL << (bits - 1)) || value >= (1LL << bits))) {
    PyErr_Format(PyExc_OverflowError, "expected a %d-bit integer, got %lld", bits, value);
    return false;
  }
  return parameters.add(static_cast<uint64_t>(value));
}

bool add_float(PyObject* argument, char kind, Parameters& parameters) {
  const double value = PyFloat_AsDouble(argument);
  if (value == -1.0 && PyErr_Occurred()) return false;
  uint64_t bits = 0;
  if (kind == 'd') {
    std::memcpy(&bits, &value, sizeof value);
  } else {
    const float single = static_cast<float>(value);
    std::memcpy(&bits, &single, sizeof single);
  }
  return parameters.add(bits);
}

bool add_descriptor(const Driver& cuda, const Kernel& kernel, PyObject* argument, Parameters& parameters) {
  const auto index = static_cast<size_t>(parameters.num_maps++);
  const MapRecipe& recipe = kernel.maps[index];
  Encoded& encoded = parameters.maps[index];
  if (!parameters_of(cuda, argument, recipe, &encoded) || !parameters.point_at(&encoded.map)) return false;
  bool is_right = true;
  for (int i = 0; i < recipe.rank; ++i) is_right = is_right && parameters.point_at(&encoded.sizes[i]);
  for (int i = 0; i < recipe.rank; ++i) is_right = is_right && parameters.point_at(&encoded.strides[i]);
  return is_right;
}

// The arguments of a call, or the elements of a tuple.
struct Arguments {
  PyObject* const* values;
  PyObject* tuple;
  Py_ssize_t size;

  PyObject* operator[](Py_ssize_t i) const { return tuple == nullptr ? values[i] : PyTuple_GetItem(tuple, i); }
};

// Collects arguments by the layout from `at` on, up to the end of the layout or of the current tuple.
bool collect(const Driver& cuda, const Kernel& kernel, size_t& at, const Arguments& arguments, Parameters& parameters) {
  Py_ssize_t used = 0;
  for (; at < kernel.layout.size(); ++at) {
    const char kind = kernel.layout[at];
    if (kind == ')') break;
    if (kind == '0') {
      if (!parameters.add(0)) return false;
      continue;
    }
    PyObject* const argument = used < arguments.size ? arguments[used] : nullptr;
    ++used;
    if (argument == nullptr) continue;  // the count is checked below
    bool is_right = true;
    if (kind == 'p') is_right = add_pointer(cuda, argument, parameters);
    else if (kind == 'T') is_right = add_descriptor(cuda, kernel, argument, parameters);
    else if (kind == 'f' || kind == 'd') is_right = add_float(argument, kind, parameters);
    else if (kind == '(') {
      if (!PyTuple_Check(argument)) {
        PyErr_SetString(PyExc_TypeError, "expected a tuple");
        return false;
      }
      ++at;
      is_right = collect(cuda, kernel, at, {nullptr, argument, PyTuple_Size(argument)}, parameters);
    } else if (kind != 'n') {
      is_right = add_integer(argument, kind, parameters);
    }
    if (!is_right) return false;
  }
  if (used == arguments.size) return true;
  PyErr_Format(PyExc_TypeError, "expected %zd arguments of a kernel or elements of a tuple, got %zd", used,
               arguments.size);
  return false;
}

const char* const kKernel = "fastformer.kernel";

// Launches the kernel in the capsule. arguments: (grid_x, grid_y, grid_z, stream, *arguments of the kernel).
PyObject* launch(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
  const auto* kernel = static_cast<const Kernel*>(PyCapsule_GetPointer(capsule, kKernel));
  const Driver* const cuda = driver();
  if (kernel == nullptr || cuda == nullptr) return nullptr;
  if (count < 4) {
    PyErr_SetString(PyExc_TypeError, "expected a grid of three numbers, a stream and the kernel's arguments");
    return nullptr;
  }
  unsigned long long numbers[4];
  for (int i = 0; i < 4; ++i) {
    numbers[i] = PyLong_AsUnsignedLongLong(arguments[i]);
    if (numbers[i] == static_cast<unsigned long long>(-1) && PyErr_Occurred()) return nullptr;
  }
  if (!enter_context(*cuda, kernel->device)) return nullptr;
  Parameters parameters;
  size_t at = 0;
  if (!collect(*cuda, *kernel, at, {arguments + 4, nullptr, count - 4}, parameters)) return nullptr;
  if (numbers[0] * numbers[1] * numbers[2] == 0) Py_RETURN_NONE;
  const auto size = [&numbers](int i) { return static_cast<unsigned>(numbers[i]); };
  const LaunchConfig config = {size(0), size(1), size(2),        kernel->threads,
                               1,       1,       kernel->shared, reinterpret_cast<void*>(numbers[3]),
                               nullptr, 0};
  const auto start = [&] {
    const python::Released released;  // the driver waits if its queue is full
    return cuda->launch(&config, kernel->function, parameters.places, nullptr);
  };
  if (!is_well(*cuda, start(), "cuLaunchKernelEx")) return nullptr;
  Py_RETURN_NONE;
}

void destroy(PyObject* capsule) {
  auto* kernel = static_cast<Kernel*>(PyCapsule_GetPointer(capsule, kKernel));
  for (const MapRecipe& recipe : kernel->maps) Py_DECREF(recipe.key);
  delete kernel;
}

// Reads recipes from tuples (swizzle, element_bytes, element_type, box).
bool read_recipes(PyObject* tuples, Kernel& kernel) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(tuples); ++i) {
    PyObject *const tuple = PyTuple_GetItem(tuples, i), *box = nullptr;
    MapRecipe recipe{};
    if (!PyArg_ParseTuple(tuple, "iiiO!", &recipe.swizzle, &recipe.element_bytes, &recipe.element_type, &PyTuple_Type,
                          &box))
      return false;
    recipe.rank = static_cast<int>(PyTuple_Size(box));
    if (recipe.rank < 1 || recipe.rank > kMaxRank) {
      PyErr_SetString(PyExc_ValueError, "expected a box of one to five dimensions");
      return false;
    }
    if (!read_backwards(box, recipe.rank, recipe.box)) return false;
    recipe.key = tuple;
    Py_INCREF(tuple);
    kernel.maps.push_back(recipe);
  }
  return true;
}

bool is_layout(const Kernel& kernel) {
  int depth = 0;
  size_t maps = 0;
  for (const char kind : kernel.layout) {
    depth += (kind == '(') - (kind == ')');
    maps += kind == 'T';
    if (std::strchr("pbhiqQfdn()T0", kind) == nullptr || depth < 0) return false;
  }
  return depth == 0 && maps == kernel.maps.size() && maps <= kMaxMaps;
}

// Returns a Python function that launches a kernel. arguments: (function or (cubin, name), threads, shared, device,
// layout, recipes).
PyObject* make_kernel(PyObject*, PyObject* arguments) {
  PyObject *code = nullptr, *recipes = nullptr;
  const char* layout = nullptr;
  unsigned threads = 0, shared = 0;
  int device = 0;
  if (!PyArg_ParseTuple(arguments, "OIIisO!", &code, &threads, &shared, &device, &layout, &PyTuple_Type, &recipes))
    return nullptr;
  auto* const kernel = new Kernel{nullptr, threads, shared, device, layout, {}};
  const Object capsule(PyCapsule_New(kernel, kKernel, destroy));
  if (!capsule) {
    delete kernel;
    return nullptr;
  }
  if (!read_recipes(recipes, *kernel)) return nullptr;
  if (!is_layout(*kernel)) {
    PyErr_Format(PyExc_ValueError, "expected a parameter layout with one recipe per descriptor, got %s", layout);
    return nullptr;
  }
  if (PyLong_Check(code)) {
    kernel->function = reinterpret_cast<void*>(PyLong_AsUnsignedLongLong(code));
    if (PyErr_Occurred()) return nullptr;
  } else if (PyTuple_Check(code)) {
    PyObject* image = nullptr;
    const char* name = nullptr;
    if (!PyArg_ParseTuple(code, "O!s", &PyBytes_Type, &image, &name)) return nullptr;
    const Driver* const cuda = driver();
    if (cuda == nullptr || !enter_context(*cuda, device)) return nullptr;
    void* module = nullptr;
    int limit = 0, own = 0, most = 0;
    if (!is_well(*cuda, cuda->load_module(&module, PyBytes_AsString(image)), "cuModuleLoadData") ||
        !is_well(*cuda, cuda->get_function(&kernel->function, module, name), "cuModuleGetFunction") ||
        !is_well(*cuda, cuda->device_attribute(&limit, kSharedOptIn, device), "cuDeviceGetAttribute") ||
        !is_well(*cuda, cuda->function_attribute(&own, kStaticShared, kernel->function), "cuFuncGetAttribute") ||
        !is_well(*cuda, cuda->function_attribute(&most, kMaxThreads, kernel->function), "cuFuncGetAttribute"))
      return nullptr;
    if (shared > static_cast<unsigned>(limit) || threads > static_cast<unsigned>(most)) {
      PyErr_Format(PyExc_RuntimeError,
                   "the device has %d bytes of shared memory and %d threads per block, but the kernel needs %u and %u",
                   limit, most, shared, threads);
      return nullptr;
    }
    if (shared > kDefaultShared &&
        (!is_well(*cuda, cuda->set_cache_config(kernel->function, kPreferShared), "cuFuncSetCacheConfig") ||
         !is_well(*cuda, cuda->set_function_attribute(kernel->function, kMaxDynamicShared, limit - own),
                  "cuFuncSetAttribute")))
      return nullptr;
  } else {
    PyErr_SetString(PyExc_TypeError, "expected the address of a function, or (cubin, name)");
    return nullptr;
  }
  static PyMethodDef method = {"launch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(launch)),
                               METH_FASTCALL, "(grid_x, grid_y, grid_z, stream, *arguments): launches the kernel."};
  return PyCFunction_New(&method, capsule.get());
}

PyMethodDef methods[] = {
    {"make_kernel", make_kernel, METH_VARARGS,
     "(function or (cubin, name), threads, shared, device, layout, recipes) -> a function that launches the kernel."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_launcher(PyObject* module) { python::add_functions(module, methods); }

}  // namespace fastformer

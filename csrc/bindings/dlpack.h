// DLPack 1's description of a tensor, and the function table that returns it without Python calls
// (`__dlpack_c_exchange_api__`): https://dmlc.github.io/dlpack/latest/c_api.html. The layout is the same in all
// versions 1.x, so a library that reads tensors through it works with every version of PyTorch that supports it.

#pragma once

#include <cstdint>

namespace fastformer::dlpack {

constexpr uint32_t kMajorVersion = 1;
constexpr const char* kCapsule = "dlpack_exchange_api";

struct Tensor {
  void* data;
  int32_t device_type, device_index;
  int32_t ndim;
  uint8_t code, bits;  // the dtype: its kind, and the bits of a lane
  uint16_t lanes;
  const int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct Exchange {
  uint32_t major, minor;
  Exchange* older;
  int (*allocate)(void*, void**, void*, void (*)(void*, const char*, const char*));
  int (*managed_from_object)(void*, void**);
  int (*managed_to_object)(void*, void**);
  // Describes a tensor, which keeps its memory alive. Returns -1 with a Python exception set on failure. May be null.
  int (*tensor_from_object)(void* object, Tensor* tensor);
  int (*current_stream)(int32_t, int32_t, void**);
};

}  // namespace fastformer::dlpack

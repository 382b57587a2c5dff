// A libcuda.so.1 without a device, for tests: it holds what it is handed to CUDA's rules, and writes a line of JSON for
// each launch and each tensor map to the file that stub_open names.

#include <cuda.h>
#include <elf.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default"))) CUresult

typedef struct {
  const uint8_t* image;
  int is_unloaded;
} Module;

// A parameter of a kernel, as its cubin declares it.
typedef struct {
  int offset, size;
} Parameter;

typedef struct {
  char name[256];
  const uint8_t* image;
  const Module* module;
  int num_parameters, max_threads, dynamic_shared;
  Parameter parameters[256];
} Function;

static FILE* out;
static int context, num_launches;
static uintptr_t host_memory;  // the one address that is no GPU's

__attribute__((visibility("default"))) void stub_open(const char* path) {
  if (out) fclose(out);
  out = path ? fopen(path, "w") : NULL;
  if (out) setvbuf(out, NULL, _IOLBF, 0);
}
// A function that was never compiled: it takes any launch, of parameters of these sizes in bytes.
__attribute__((visibility("default"))) void* stub_function(const int* sizes, int count) {
  Function* any = calloc(1, sizeof *any);
  snprintf(any->name, sizeof any->name, "any");
  any->dynamic_shared = 232448;
  any->num_parameters = count;
  for (int i = 0; i < count; i++) any->parameters[i].size = sizes[i];
  return any;
}
__attribute__((visibility("default"))) int stub_launches(void) { return num_launches; }
__attribute__((visibility("default"))) void stub_host_memory(uintptr_t address) { host_memory = address; }

// Reads .nv.info.<name>: attributes of (format, attribute, value or size of what follows).
static void read_parameters(Function* f) {
  const Elf64_Ehdr* header = (const void*)f->image;
  const Elf64_Shdr* sections = (const void*)(f->image + header->e_shoff);
  const char* names = (const char*)f->image + sections[header->e_shstrndx].sh_offset;
  char wanted[300];
  snprintf(wanted, sizeof wanted, ".nv.info.%s", f->name);
  for (int i = 0; i < header->e_shnum; i++) {
    if (strcmp(names + sections[i].sh_name, wanted)) continue;
    const uint8_t* at = f->image + sections[i].sh_offset;
    const uint8_t* end = at + sections[i].sh_size;
    while (at + 4 <= end) {
      uint16_t value;
      memcpy(&value, at + 2, 2);
      if (at[0] != 4) {
        at += 4;
        continue;
      }
      const uint8_t* data = at + 4;
      if (at[1] == 0x17) {  // EIATTR_KPARAM_INFO
        uint16_t ordinal, offset;
        uint32_t word;
        memcpy(&ordinal, data + 4, 2);
        memcpy(&offset, data + 6, 2);
        memcpy(&word, data + 8, 4);
        if (ordinal < 256) {
          f->parameters[ordinal] = (Parameter){offset, (int)(word >> 18)};
          if (ordinal + 1 > f->num_parameters) f->num_parameters = ordinal + 1;
        }
      }
      if (at[1] == 0x05) {  // EIATTR_MAX_THREADS
        uint32_t threads;
        memcpy(&threads, data, 4);
        f->max_threads = (int)threads;
      }
      at += 4 + value;
    }
  }
}

API cuInit(unsigned flags) { return CUDA_SUCCESS; }
API cuDriverGetVersion(int* version) { return *version = 13000, CUDA_SUCCESS; }
API cuDeviceGet(CUdevice* device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
API cuDeviceGetCount(int* count) { return *count = 1, CUDA_SUCCESS; }
API cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 233472; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    default: *value = 1;
  }
  return CUDA_SUCCESS;
}
API cuCtxGetCurrent(CUcontext* current) { return *current = (CUcontext)&context, CUDA_SUCCESS; }
API cuCtxSetCurrent(CUcontext current) { return CUDA_SUCCESS; }
API cuCtxGetDevice(CUdevice* device) { return *device = 0, CUDA_SUCCESS; }
API cuDevicePrimaryCtxRetain(CUcontext* current, CUdevice device) { return *current = (CUcontext)&context, CUDA_SUCCESS; }
API cuCtxGetLimit(size_t* value, CUlimit limit) { return *value = 1 << 20, CUDA_SUCCESS; }
API cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
API cuModuleLoadData(CUmodule* module, const void* image) {
  const Elf64_Ehdr* header = image;
  if (memcmp(header->e_ident, ELFMAG, SELFMAG)) return CUDA_ERROR_INVALID_IMAGE;
  size_t size = header->e_shoff + (size_t)header->e_shnum * header->e_shentsize;
  const size_t programs = header->e_phoff + (size_t)header->e_phnum * header->e_phentsize;
  if (programs > size) size = programs;
  Module* made = malloc(sizeof *made);
  made->image = memcpy(malloc(size), image, size);
  made->is_unloaded = 0;
  *module = (CUmodule)made;
  return CUDA_SUCCESS;
}
// The module stays in memory, so that a later launch of one of its functions can be refused.
API cuModuleUnload(CUmodule module) { return ((Module*)module)->is_unloaded = 1, CUDA_SUCCESS; }
API cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  Function* made = calloc(1, sizeof *made);
  snprintf(made->name, sizeof made->name, "%s", name);
  made->module = (const Module*)module;
  made->image = made->module->image;
  made->dynamic_shared = 49152;
  read_parameters(made);
  if (!made->num_parameters) return CUDA_ERROR_NOT_FOUND;
  *function = (CUfunction)made;
  return CUDA_SUCCESS;
}
API cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  const Function* f = (const Function*)function;
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? (f->max_threads ? f->max_threads : 1024) : 0;
  return CUDA_SUCCESS;
}
// Others are refused, as a driver of CUDA 13.0 refuses those that came later.
API cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_INVALID_VALUE;
  ((Function*)function)->dynamic_shared = value;
  return CUDA_SUCCESS;
}
API cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
API cuGetErrorString(CUresult result, const char** text) { return *text = "refused by the stub", CUDA_SUCCESS; }
API cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  if (host_memory && pointer == host_memory) return CUDA_ERROR_INVALID_VALUE;
  *(CUdeviceptr*)data = pointer;
  return CUDA_SUCCESS;
}
API cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS;
}
API cuOccupancyMaxActiveClusters(int* count, CUfunction function, const CUlaunchConfig* config) {
  return *count = 1, CUDA_SUCCESS;
}

API cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                           const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                           const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  const int bytes = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  const int span = swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128 : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64 : 32;
  int is_bad = (uintptr_t)address % 16 || rank < 1 || rank > 5 || (int)box[0] * bytes > span;
  // What the map says, packed: its own bytes are the driver's secret.
  uint64_t words[16] = {(uint64_t)address, rank | (uint64_t)type << 8 | (uint64_t)interleave << 16 |
                        (uint64_t)swizzle << 24 | (uint64_t)promotion << 32 | (uint64_t)fill << 40};
  for (unsigned i = 0; i < rank && i < 5; i++) {
    is_bad |= sizes[i] == 0 || sizes[i] > (1ull << 32) || box[i] == 0 || box[i] > 256 || element_strides[i] != 1;
    words[2 + i] = sizes[i];
    words[11 + i / 2] |= (uint64_t)box[i] << (32 * (i % 2));
    if (i + 1 < rank) {
      is_bad |= strides[i] % 16 || strides[i] >= (1ull << 40);
      words[7 + i] = strides[i];
    }
  }
  memcpy(map, words, sizeof words);
  if (out) fprintf(out, "{\"tensor_map\": \"%p\", \"bad\": %s}\n", address, is_bad ? "true" : "false");
  return is_bad ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

API cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) {
  const Function* f = (const Function*)function;
  const unsigned threads = config->blockDimX * config->blockDimY * config->blockDimZ;
  const int is_bad = config->gridDimX > 2147483647u || config->gridDimY > 65535 || config->gridDimZ > 65535 ||
                     (f->module && f->module->is_unloaded) || (f->max_threads && threads > (unsigned)f->max_threads) ||
                     config->sharedMemBytes > (unsigned)f->dynamic_shared || (config->numAttrs && !config->attrs);
  num_launches++;
  if (out) {
    fprintf(out, "{\"kernel\": \"%s\", \"grid\": [%u, %u, %u], \"threads\": %u, \"shared\": %u, \"stream\": %llu, ",
            f->name, config->gridDimX, config->gridDimY, config->gridDimZ, threads, config->sharedMemBytes,
            (unsigned long long)(uintptr_t)config->hStream);
    fprintf(out, "\"attributes\": %u, \"extra\": %s, \"bad\": %s, \"parameters\": [", config->numAttrs,
            extra ? "true" : "false", is_bad ? "true" : "false");
    for (int i = 0; i < f->num_parameters; i++) {
      fprintf(out, i ? ", \"" : "\"");
      for (int k = 0; k < f->parameters[i].size; k++) fprintf(out, "%02x", ((const uint8_t*)parameters[i])[k]);
      fprintf(out, "\"");
    }
    fprintf(out, "]}\n");
  }
  return is_bad ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

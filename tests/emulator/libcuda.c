/* SPDX-License-Identifier: Apache-2.0 */
/* A libcuda without a GPU: as much of it as Triton's driver calls. Launches are handed to a function that
   Python sets; a tensor map keeps what it was made of, for tensor_map() in driver.py. */
#include <stdint.h>
#include <string.h>

#include "cuda.h"

typedef int (*launch_function)(uint64_t function, const unsigned *grid, unsigned threads, unsigned shared,
                               void **parameters, uint64_t stream);
typedef uint64_t (*memory_function)(uint64_t address, uint64_t nbytes); /* nbytes 0: give it back */
typedef uint64_t (*stream_function)(void);
static launch_function launch;
static memory_function memory;
static stream_function new_stream;
static CUcontext context;

void emulator_on_launch(launch_function function) { launch = function; }
void emulator_on_memory(memory_function function, stream_function stream) { memory = function, new_stream = stream; }

/* An H100, as far as Triton asks. */
static int attribute(CUdevice_attribute asked) {
  switch (asked) {
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return 232448;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return 233472;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 49152;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 132;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: return 65536;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return 0;
  default: return 1;
  }
}

CUresult cuInit(unsigned flags) { return 0; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return 0; }
CUresult cuGetErrorString(CUresult code, const char **text) { *text = "the emulator found a fault"; return 0; }
CUresult cuGetErrorName(CUresult code, const char **text) { *text = "EMULATOR"; return 0; }
CUresult cuDeviceGet(CUdevice *device, int number) { *device = number; return 0; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return 0; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute asked, CUdevice device) {
  *value = attribute(asked);
  return 0;
}
CUresult cuCtxGetCurrent(CUcontext *current) { *current = context; return 0; }
CUresult cuCtxSetCurrent(CUcontext wanted) { context = wanted; return 0; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *made, CUdevice device) { *made = (CUcontext)1; return 0; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)image; return 0; }
CUresult cuModuleUnload(CUmodule module) { return 0; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  static uint64_t last;
  *function = (CUfunction)++last;
  return 0;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute asked, CUfunction function) {
  *value = asked == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return 0;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute asked, int value) { return 0; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return 0; }
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute asked, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return 0;
}
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *asked, void **values, CUdeviceptr pointer) {
  for (unsigned i = 0; i < count; i++) *(CUdeviceptr *)values[i] = pointer;
  return 0;
}
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return 0; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return 0; }
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
  *count = 1;
  return 0;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return 0;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  unsigned grid[3] = {config->gridDimX, config->gridDimY, config->gridDimZ};
  return launch((uint64_t)function, grid, config->blockDimX, config->sharedMemBytes, parameters,
                (uint64_t)config->hStream);
}

/* What pd_connector/memory/cuda_driver.py calls. */
CUresult cuMemAlloc(CUdeviceptr *address, size_t nbytes) { *address = memory(0, nbytes); return 0; }
CUresult cuMemFree(CUdeviceptr address) { memory(address, 0); return 0; }
CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
  *stream = (CUstream)new_stream();
  return 0;
}
CUresult cuCtxPushCurrent(CUcontext wanted) { return wanted ? 0 : CUDA_ERROR_INVALID_CONTEXT; }
CUresult cuCtxPopCurrent(CUcontext *was) { *was = (CUcontext)1; return 0; }
CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return 0; }
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
  *mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  return 0;
}

/* Two dimensions of elements of 1, 2 or 4 bytes, with the real library's conditions. */
struct tensor_map { uint64_t base, columns, rows, pitch, element, width, height, swizzle; };

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  struct tensor_map made = {.base = (uint64_t)base, .swizzle = swizzle};
  if (rank != 2) return CUDA_ERROR_INVALID_VALUE;
  switch (type) {
  case CU_TENSOR_MAP_DATA_TYPE_UINT8: made.element = 1; break;
  case CU_TENSOR_MAP_DATA_TYPE_UINT16:
  case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
  case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: made.element = 2; break;
  case CU_TENSOR_MAP_DATA_TYPE_UINT32:
  case CU_TENSOR_MAP_DATA_TYPE_FLOAT32: made.element = 4; break;
  default: return CUDA_ERROR_INVALID_VALUE;
  }
  made.columns = sizes[0], made.rows = sizes[1], made.pitch = strides[0];
  made.width = box[0], made.height = box[1];
  for (int i = 0; i < 2; i++)
    if (!sizes[i] || sizes[i] > 1ull << 32 || !box[i] || box[i] > 256 || steps[i] != 1) return CUDA_ERROR_INVALID_VALUE;
  uint64_t row = made.width * made.element;
  if (made.base % 16 || made.pitch % 16 || made.pitch >= 1ull << 40 || row % 16) return CUDA_ERROR_INVALID_VALUE;
  if (swizzle == CU_TENSOR_MAP_SWIZZLE_128B && row > 128) return CUDA_ERROR_INVALID_VALUE;
  if (swizzle != CU_TENSOR_MAP_SWIZZLE_128B && swizzle != CU_TENSOR_MAP_SWIZZLE_NONE) return CUDA_ERROR_INVALID_VALUE;
  memset(map, 0, sizeof *map);
  memcpy(map, &made, sizeof made);
  return 0;
}

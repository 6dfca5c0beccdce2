// A CUDA driver on the strict double of HIP's library, so that forward.cpp runs without a GPU:
// forward.cpp turns HIP calls into CUDA calls, and this driver turns them into the same HIP calls.
//
// HIP_FORWARD_DOUBLE names the double's library. All memory of a device is fine-grained, and
// streams wait on it under HIP_DOUBLE_WAIT_ANY=1, since CUDA has one kind of memory.

#include <cuda.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

namespace {

template <typename... Arguments>
CUresult hip(const char* name, Arguments... arguments) {
  static void* library = dlopen(getenv("HIP_FORWARD_DOUBLE"), RTLD_NOW | RTLD_LOCAL);
  auto* function = library ? dlsym(library, name) : nullptr;
  if (!function) {
    fprintf(stderr, "fake driver: %s: %s\n", name, dlerror());
    abort();
  }
  return static_cast<CUresult>(reinterpret_cast<int (*)(Arguments...)>(function)(arguments...));
}

thread_local CUcontext current = nullptr;

CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(uintptr_t(device) + 1); }
int device_of(CUcontext context) { return int(reinterpret_cast<uintptr_t>(context)) - 1; }
void* memory(CUdeviceptr pointer) { return reinterpret_cast<void*>(pointer); }

struct IpcMemHandle {
  char reserved[64];
};

}  // namespace

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error ? "an error of the fake driver" : "no error";
  return CUDA_SUCCESS;
}

// Devices.

API CUresult cuDeviceGetCount(int* count) { return hip("hipGetDeviceCount", count); }
API CUresult cuDeviceGet(CUdevice* device, int index) {
  *device = index;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  int number;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: number = 2; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: number = 63; break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: number = 67; break;
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID: number = 68; break;
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: number = 69; break;
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS: number = 10013; break;
    case CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES: *value = 0; return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
  }
  return hip("hipDeviceGetAttribute", value, number, device);
}
API CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  return hip("hipDeviceCanAccessPeer", can, device, peer);
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = context_of(device);
  return CUDA_SUCCESS;
}
API CUresult cuCtxSetCurrent(CUcontext context) {
  current = context;
  return hip("hipSetDevice", device_of(context));
}
API CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = current;
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetDevice(CUdevice* device) {
  *device = device_of(current);
  return CUDA_SUCCESS;
}
API CUresult cuCtxEnablePeerAccess(CUcontext context, unsigned flags) {
  return hip("hipDeviceEnablePeerAccess", device_of(context), flags);
}

// Memory.

API CUresult cuMemAlloc(CUdeviceptr* pointer, size_t nbytes) {
  return hip("hipExtMallocWithFlags", reinterpret_cast<void**>(pointer), nbytes, 1u);
}
API CUresult cuMemFree(CUdeviceptr pointer) { return hip("hipFree", memory(pointer)); }
API CUresult cuMemHostAlloc(void** pointer, size_t nbytes, unsigned flags) {
  return hip("hipHostMalloc", pointer, nbytes, flags);
}
API CUresult cuMemFreeHost(void* pointer) { return hip("hipHostFree", pointer); }
API CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr pointer) {
  return hip("hipIpcGetMemHandle", reinterpret_cast<IpcMemHandle*>(handle), memory(pointer));
}
API CUresult cuIpcOpenMemHandle(CUdeviceptr* pointer, CUipcMemHandle handle, unsigned flags) {
  IpcMemHandle hip_handle;
  memcpy(&hip_handle, &handle, sizeof hip_handle);
  return hip("hipIpcOpenMemHandle", reinterpret_cast<void**>(pointer), hip_handle, flags);
}
API CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
  return hip("hipIpcCloseMemHandle", memory(pointer));
}

// Streams and events.

API CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
  return hip("hipStreamCreateWithPriority", stream, flags, priority);
}
API CUresult cuStreamDestroy(CUstream stream) { return hip("hipStreamDestroy", stream); }
API CUresult cuStreamQuery(CUstream stream) { return hip("hipStreamQuery", stream); }
API CUresult cuEventCreate(CUevent* event, unsigned flags) {
  return hip("hipEventCreateWithFlags", event, flags);
}
API CUresult cuEventDestroy(CUevent event) { return hip("hipEventDestroy", event); }
API CUresult cuEventRecord(CUevent event, CUstream stream) {
  return hip("hipEventRecord", event, stream);
}
API CUresult cuEventQuery(CUevent event) { return hip("hipEventQuery", event); }
API CUresult cuEventElapsedTime(float* ms, CUevent start, CUevent stop) {
  return hip("hipEventElapsedTime", ms, start, stop);
}
API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  return hip("hipStreamWaitEvent", stream, event, flags);
}

// Operations of streams.

API CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t nbytes, CUstream stream) {
  return hip("hipMemcpyDtoDAsync", memory(to), memory(from), nbytes, stream);
}
API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t nbytes, CUstream stream) {
  return hip("hipMemcpyAsync", memory(to), memory(from), nbytes, 4, stream);
}
API CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext target, CUdeviceptr from,
                               CUcontext source, size_t nbytes, CUstream stream) {
  return hip("hipMemcpyPeerAsync", memory(to), device_of(target), memory(from), device_of(source),
             nbytes, stream);
}
API CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D* part, CUstream stream) {
  if (part->srcMemoryType != CU_MEMORYTYPE_DEVICE || part->dstMemoryType != CU_MEMORYTYPE_DEVICE)
    return CUDA_ERROR_INVALID_VALUE;
  return hip("hipMemcpy2DAsync", memory(part->dstDevice), part->dstPitch, memory(part->srcDevice),
             part->srcPitch, part->WidthInBytes, part->Height, 3, stream);
}
API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
  return hip("hipMemsetAsync", memory(to), int(value), count, stream);
}
API CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr to, cuuint32_t value,
                                  unsigned flags) {
  return hip("hipStreamWriteValue32", stream, memory(to), value, flags);
}
API CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr on, cuuint32_t value,
                                 unsigned flags) {
  return hip("hipStreamWaitValue32", stream, memory(on), value, flags, UINT32_MAX);
}
API CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* argument) {
  return hip("hipLaunchHostFunc", stream, function, argument);
}

// Graphs.

API CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  return hip("hipThreadExchangeStreamCaptureMode", mode);
}
API CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
  return hip("hipStreamBeginCapture", stream, mode);
}
API CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  return hip("hipStreamEndCapture", stream, graph);
}
API CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return hip("hipStreamIsCapturing", stream, status);
}
#if CUDA_VERSION >= 13000
API CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id,
                                    CUgraph*, const CUgraphNode**, const CUgraphEdgeData**,
                                    size_t*) {
#else
API CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id,
                                    CUgraph*, const CUgraphNode**, size_t*) {
#endif
  return hip("hipStreamGetCaptureInfo", stream, status, id);
}
API CUresult cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph,
                                         unsigned long long flags) {
  return hip("hipGraphInstantiateWithFlags", exec, graph, flags);
}
API CUresult cuGraphLaunch(CUgraphExec graph, CUstream stream) {
  return hip("hipGraphLaunch", graph, stream);
}
API CUresult cuGraphDestroy(CUgraph graph) { return hip("hipGraphDestroy", graph); }
API CUresult cuGraphExecDestroy(CUgraphExec graph) { return hip("hipGraphExecDestroy", graph); }

// Kernels.

API CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  return hip("hipModuleLoadData", module, image);
}
API CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  return hip("hipModuleGetFunction", function, module, name);
}
API CUresult cuFuncLoad(CUfunction function) {
  return function ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
API CUresult cuModuleUnload(CUmodule module) { return hip("hipModuleUnload", module); }
API CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                            unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                            CUstream stream, void** arguments, void** extra) {
  return hip("hipModuleLaunchKernel", function, grid_x, grid_y, grid_z, block_x, block_y, block_z,
             shared, stream, arguments, extra);
}

// libamdhip64.so on an NVIDIA GPU: forwards the HIP calls that ficco makes to the CUDA driver.
//
// With this library and the real hip-python the HIP engine runs on real copy engines, streams and
// memory of other processes. Streams, events, addresses and functions are those of the driver, so
// PyTorch's streams can be passed. The context is the device's primary context, as in PyTorch.
//
// Differences between HIP and CUDA:
//   - the driver shares memory between processes in blocks of 2 MiB, so allocations are multiples
//     of 2 MiB; a signal of 8 bytes takes one block;
//   - streams can wait on memory of any kind, and a device does not cache the memory of a peer:
//     "signal" and "uncached" memory is plain memory;
//   - a wait has no mask, and requests a flush of remote writes on devices that support it;
//   - the driver loads kernels that are compiled for the card: ficco compiles for the device that
//     PyTorch reports.
//
// The library opens the driver by name and links no other library. HIP_FORWARD_DRIVER names another
// driver.

#include <cuda.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#define API extern "C" __attribute__((visibility("default")))

namespace {

void* driver() {
  static void* library = [] {
    const char* named = getenv("HIP_FORWARD_DRIVER");
    void* opened = dlopen(named && *named ? named : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!opened) fprintf(stderr, "hip forward: %s\n", dlerror());
    return opened;
  }();
  return library;
}

[[noreturn]] void no_function(const char* name) {
  fprintf(stderr, "hip forward: the CUDA driver has no %s\n", name);
  abort();
}

template <typename Function>
Function* look_up(const char* name) {
  auto* function = driver() ? reinterpret_cast<Function*>(dlsym(driver(), name)) : nullptr;
  if (!function) no_function(name);
  return function;
}

// Names in cuda.h are macros that add the version of the function.
#define TEXT(name) #name
#define DRIVER(name)                                             \
  ([] {                                                          \
    static auto* function = look_up<decltype(name)>(TEXT(name)); \
    return function;                                             \
  }())

// Error codes are those of CUDA; codes that HIP lacks become hipErrorUnknown.
constexpr int SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_DEVICE = 101,
              NO_DEVICE = 100, NOT_READY = 600, NOT_SUPPORTED = 801, UNKNOWN = 999;
const std::map<int, const char*> NAMES = {
    {SUCCESS, "hipSuccess"},
    {INVALID_VALUE, "hipErrorInvalidValue"},
    {2, "hipErrorOutOfMemory"},
    {NOT_INITIALIZED, "hipErrorNotInitialized"},
    {4, "hipErrorDeinitialized"},
    {NO_DEVICE, "hipErrorNoDevice"},
    {INVALID_DEVICE, "hipErrorInvalidDevice"},
    {200, "hipErrorInvalidImage"},
    {201, "hipErrorInvalidContext"},
    {205, "hipErrorMapFailed"},
    {209, "hipErrorNoBinaryForGpu"},
    {214, "hipErrorECCNotCorrectable"},
    {217, "hipErrorPeerAccessUnsupported"},
    {304, "hipErrorOperatingSystem"},
    {400, "hipErrorInvalidHandle"},
    {401, "hipErrorIllegalState"},
    {500, "hipErrorNotFound"},
    {NOT_READY, "hipErrorNotReady"},
    {700, "hipErrorIllegalAddress"},
    {701, "hipErrorLaunchOutOfResources"},
    {702, "hipErrorLaunchTimeOut"},
    {704, "hipErrorPeerAccessAlreadyEnabled"},
    {705, "hipErrorPeerAccessNotEnabled"},
    {709, "hipErrorContextIsDestroyed"},
    {710, "hipErrorAssert"},
    {712, "hipErrorHostMemoryAlreadyRegistered"},
    {719, "hipErrorLaunchFailure"},
    {NOT_SUPPORTED, "hipErrorNotSupported"},
    {900, "hipErrorStreamCaptureUnsupported"},
    {901, "hipErrorStreamCaptureInvalidated"},
    {902, "hipErrorStreamCaptureMerge"},
    {903, "hipErrorStreamCaptureUnmatched"},
    {904, "hipErrorStreamCaptureUnjoined"},
    {905, "hipErrorStreamCaptureIsolation"},
    {906, "hipErrorStreamCaptureImplicit"},
    {907, "hipErrorCapturedEvent"},
    {908, "hipErrorStreamCaptureWrongThread"},
    {UNKNOWN, "hipErrorUnknown"},
};

thread_local int last_error = SUCCESS;  // until hipGetLastError

int latch(int code) {
  if (code) last_error = code;
  return code;
}

int mapped(CUresult result) { return latch(NAMES.count(result) ? result : UNKNOWN); }

#define TRY(expression)                         \
  do {                                          \
    if (int code = mapped(expression)) return code; \
  } while (0)

int start() {
  static CUresult result = driver() ? DRIVER(cuInit)(0) : CUDA_ERROR_NO_DEVICE;
  return mapped(result);
}

// The primary context of a device, retained until the process ends.
int context_of(int index, CUcontext& context) {
  static std::mutex guard;
  static std::map<int, CUcontext> known;
  std::lock_guard<std::mutex> lock(guard);
  auto entry = known.find(index);
  if (entry == known.end()) {
    CUdevice device;
    TRY(DRIVER(cuDeviceGet)(&device, index));
    CUcontext retained;
    TRY(DRIVER(cuDevicePrimaryCtxRetain)(&retained, device));
    entry = known.emplace(index, retained).first;
  }
  context = entry->second;
  return SUCCESS;
}

int use(int index) {
  CUcontext context = nullptr;
  if (int code = context_of(index, context)) return code;
  return mapped(DRIVER(cuCtxSetCurrent)(context));
}

// Threads without a device use the first device.
int enter() {
  if (int code = start()) return code;
  CUcontext context = nullptr;
  TRY(DRIVER(cuCtxGetCurrent)(&context));
  return context ? SUCCESS : use(0);
}

#define ENTER()                               \
  do {                                        \
    if (int code = enter()) return code;      \
  } while (0)

CUdeviceptr at(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

constexpr size_t BLOCK = 2 << 20;  // smallest unit that the driver shares, in bytes

int allocate(void** pointer, size_t nbytes) {
  ENTER();
  if (!pointer) return latch(INVALID_VALUE);
  *pointer = nullptr;
  if (!nbytes) return SUCCESS;
  CUdeviceptr allocated = 0;
  TRY(DRIVER(cuMemAlloc)(&allocated, (nbytes + BLOCK - 1) / BLOCK * BLOCK));
  *pointer = reinterpret_cast<void*>(allocated);
  return SUCCESS;
}

struct IpcMemHandle {
  char reserved[64];
};
static_assert(sizeof(CUipcMemHandle) == sizeof(IpcMemHandle));

}  // namespace

// Errors.

API const char* hipGetErrorName(int code) {
  auto entry = NAMES.find(code);
  return entry == NAMES.end() ? NAMES.at(UNKNOWN) : entry->second;
}
API const char* hipGetErrorString(int code) {
  const char* text = nullptr;
  if (driver()) DRIVER(cuGetErrorString)(static_cast<CUresult>(code), &text);
  return text ? text : "unknown error";
}
API int hipGetLastError() { return std::exchange(last_error, SUCCESS); }

// Devices.

API int hipRuntimeGetVersion(int* version) {
  *version = 70200000;
  return SUCCESS;
}
API int hipGetDeviceCount(int* count) {
  *count = 0;
  if (int code = start()) return code;
  TRY(DRIVER(cuDeviceGetCount)(count));
  return *count ? SUCCESS : latch(NO_DEVICE);
}
API int hipSetDevice(int index) {
  if (int code = start()) return code;
  return use(index);
}
API int hipGetDevice(int* index) {
  ENTER();
  CUdevice device;
  TRY(DRIVER(cuCtxGetDevice)(&device));
  *index = device;
  return SUCCESS;
}
API int hipDeviceGetAttribute(int* value, int attribute, int index) {
  if (int code = start()) return code;
  CUdevice device;
  TRY(DRIVER(cuDeviceGet)(&device, index));
  CUdevice_attribute wanted;
  switch (attribute) {
    case 2: wanted = CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT; break;
    case 63: wanted = CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT; break;
    case 67: wanted = CU_DEVICE_ATTRIBUTE_PCI_BUS_ID; break;
    case 68: wanted = CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID; break;
    case 69: wanted = CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID; break;
    case 10013: wanted = CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS; break;  // wait values
    case 10017: *value = 1'000'000; return SUCCESS;  // kHz of the clock that kernels read: 1 ns
    default: return latch(INVALID_VALUE);
  }
  TRY(DRIVER(cuDeviceGetAttribute)(value, wanted, device));
  return SUCCESS;
}
API int hipDeviceCanAccessPeer(int* can, int index, int peer) {
  if (int code = start()) return code;
  CUdevice device, other;
  TRY(DRIVER(cuDeviceGet)(&device, index));
  TRY(DRIVER(cuDeviceGet)(&other, peer));
  TRY(DRIVER(cuDeviceCanAccessPeer)(can, device, other));
  return SUCCESS;
}
API int hipDeviceEnablePeerAccess(int peer, unsigned flags) {
  ENTER();
  if (flags) return latch(INVALID_VALUE);
  CUcontext context = nullptr;
  if (int code = context_of(peer, context)) return code;
  return mapped(DRIVER(cuCtxEnablePeerAccess)(context, 0));
}

// Memory.

API int hipMalloc(void** pointer, size_t nbytes) { return allocate(pointer, nbytes); }
API int hipExtMallocWithFlags(void** pointer, size_t nbytes, unsigned flags) {
  if (flags > 3 || (flags == 2 && nbytes != 8)) return latch(INVALID_VALUE);
  return allocate(pointer, nbytes);
}
API int hipHostMalloc(void** pointer, size_t nbytes, unsigned) {
  ENTER();
  return mapped(DRIVER(cuMemHostAlloc)(
      pointer, nbytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
}
API int hipFree(void* pointer) {
  ENTER();
  return pointer ? mapped(DRIVER(cuMemFree)(at(pointer))) : SUCCESS;
}
API int hipHostFree(void* pointer) {
  ENTER();
  return pointer ? mapped(DRIVER(cuMemFreeHost)(pointer)) : SUCCESS;
}
API int hipIpcGetMemHandle(IpcMemHandle* handle, void* pointer) {
  ENTER();
  return mapped(
      DRIVER(cuIpcGetMemHandle)(reinterpret_cast<CUipcMemHandle*>(handle), at(pointer)));
}
API int hipIpcOpenMemHandle(void** pointer, IpcMemHandle handle, unsigned flags) {
  ENTER();
  CUipcMemHandle driver_handle;
  memcpy(&driver_handle, &handle, sizeof driver_handle);
  CUdeviceptr address = 0;
  *pointer = nullptr;
  TRY(DRIVER(cuIpcOpenMemHandle)(&address, driver_handle, flags));
  *pointer = reinterpret_cast<void*>(address);
  return SUCCESS;
}
API int hipIpcCloseMemHandle(void* pointer) {
  ENTER();
  return mapped(DRIVER(cuIpcCloseMemHandle)(at(pointer)));
}

// Streams and events.

API int hipStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
  ENTER();
  return mapped(DRIVER(cuStreamCreateWithPriority)(stream, flags, priority));
}
API int hipStreamDestroy(CUstream stream) {
  ENTER();
  return mapped(DRIVER(cuStreamDestroy)(stream));
}
API int hipStreamQuery(CUstream stream) {
  ENTER();
  return mapped(DRIVER(cuStreamQuery)(stream));
}
API int hipEventCreateWithFlags(CUevent* event, unsigned flags) {
  ENTER();
  return mapped(DRIVER(cuEventCreate)(event, flags));
}
API int hipEventDestroy(CUevent event) {
  ENTER();
  return mapped(DRIVER(cuEventDestroy)(event));
}
API int hipEventRecord(CUevent event, CUstream stream) {
  ENTER();
  return mapped(DRIVER(cuEventRecord)(event, stream));
}
API int hipEventQuery(CUevent event) {
  ENTER();
  return mapped(DRIVER(cuEventQuery)(event));
}
API int hipEventElapsedTime(float* ms, CUevent start, CUevent stop) {
  ENTER();
  return mapped(DRIVER(cuEventElapsedTime)(ms, start, stop));
}
API int hipStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  ENTER();
  return mapped(DRIVER(cuStreamWaitEvent)(stream, event, flags));
}

// Operations of streams.

API int hipMemcpyDtoDAsync(void* target, void* source, size_t nbytes, CUstream stream) {
  ENTER();
  return mapped(DRIVER(cuMemcpyDtoDAsync)(at(target), at(source), nbytes, stream));
}
API int hipMemcpyAsync(void* target, const void* source, size_t nbytes, int kind,
                       CUstream stream) {
  ENTER();
  if (kind == 3 || kind == 1024)  // within or between devices
    return mapped(DRIVER(cuMemcpyDtoDAsync)(at(target), at(source), nbytes, stream));
  return mapped(DRIVER(cuMemcpyAsync)(at(target), at(source), nbytes, stream));
}
API int hipMemcpyPeerAsync(void* target, int to, const void* source, int from, size_t nbytes,
                           CUstream stream) {
  ENTER();
  CUcontext target_context = nullptr, source_context = nullptr;
  if (int code = context_of(to, target_context)) return code;
  if (int code = context_of(from, source_context)) return code;
  return mapped(DRIVER(cuMemcpyPeerAsync)(at(target), target_context, at(source), source_context,
                                          nbytes, stream));
}
API int hipMemcpy2DAsync(void* target, size_t target_pitch, const void* source,
                         size_t source_pitch, size_t width, size_t height, int kind,
                         CUstream stream) {
  ENTER();
  auto memory = kind == 3 || kind == 1024 ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_UNIFIED;
  CUDA_MEMCPY2D part = {};
  part.srcMemoryType = part.dstMemoryType = memory;
  part.srcDevice = at(source);
  part.dstDevice = at(target);
  part.srcPitch = source_pitch;
  part.dstPitch = target_pitch;
  part.WidthInBytes = width;
  part.Height = height;
  return mapped(DRIVER(cuMemcpy2DAsync)(&part, stream));
}
API int hipMemsetAsync(void* target, int value, size_t nbytes, CUstream stream) {
  ENTER();
  return mapped(DRIVER(cuMemsetD8Async)(at(target), value, nbytes, stream));
}
API int hipStreamWriteValue32(CUstream stream, void* pointer, uint32_t value, unsigned) {
  ENTER();
  return mapped(DRIVER(cuStreamWriteValue32)(stream, at(pointer), value, 0));
}
API int hipStreamWaitValue32(CUstream stream, void* pointer, uint32_t value, unsigned flags,
                             uint32_t mask) {
  ENTER();
  if (mask != UINT32_MAX || flags > 3) return latch(NOT_SUPPORTED);
  static std::mutex guard;
  static std::map<CUdevice, unsigned> known;  // flags of the waits of a device
  CUdevice device;
  TRY(DRIVER(cuCtxGetDevice)(&device));
  {
    std::lock_guard<std::mutex> lock(guard);
    auto entry = known.find(device);
    if (entry == known.end()) {
      int can = 0;
      DRIVER(cuDeviceGetAttribute)(&can, CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, device);
      entry = known.emplace(device, can ? unsigned(CU_STREAM_WAIT_VALUE_FLUSH) : 0u).first;
    }
    flags |= entry->second;
  }
  return mapped(DRIVER(cuStreamWaitValue32)(stream, at(pointer), value, flags));
}
API int hipLaunchHostFunc(CUstream stream, void (*function)(void*), void* argument) {
  ENTER();
  return mapped(DRIVER(cuLaunchHostFunc)(stream, function, argument));
}

// Graphs.

API int hipThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  ENTER();
  return mapped(DRIVER(cuThreadExchangeStreamCaptureMode)(mode));
}
API int hipStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
  ENTER();
  return mapped(DRIVER(cuStreamBeginCapture)(stream, mode));
}
API int hipStreamEndCapture(CUstream stream, CUgraph* graph) {
  ENTER();
  return mapped(DRIVER(cuStreamEndCapture)(stream, graph));
}
API int hipStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  ENTER();
  return mapped(DRIVER(cuStreamIsCapturing)(stream, status));
}
API int hipStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus* status,
                                unsigned long long* id) {
  ENTER();
  cuuint64_t capture = 0;
#if CUDA_VERSION >= 13000
  TRY(DRIVER(cuStreamGetCaptureInfo)(stream, status, &capture, nullptr, nullptr, nullptr, nullptr));
#else
  TRY(DRIVER(cuStreamGetCaptureInfo)(stream, status, &capture, nullptr, nullptr, nullptr));
#endif
  if (id) *id = capture;
  return SUCCESS;
}
API int hipGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph, unsigned long long flags) {
  ENTER();
  return mapped(DRIVER(cuGraphInstantiateWithFlags)(exec, graph, flags));
}
API int hipGraphLaunch(CUgraphExec graph, CUstream stream) {
  ENTER();
  return mapped(DRIVER(cuGraphLaunch)(graph, stream));
}
API int hipGraphDestroy(CUgraph graph) {
  ENTER();
  return mapped(DRIVER(cuGraphDestroy)(graph));
}
API int hipGraphExecDestroy(CUgraphExec graph) {
  ENTER();
  return mapped(DRIVER(cuGraphExecDestroy)(graph));
}

// Kernels.

API int hipModuleLoadData(CUmodule* module, const void* image) {
  ENTER();
  return mapped(DRIVER(cuModuleLoadData)(module, image));
}
API int hipModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  ENTER();
  TRY(DRIVER(cuModuleGetFunction)(function, module, name));
  // Load now: the first launch of the function may be in a capture.
  return mapped(DRIVER(cuFuncLoad)(*function));
}
API int hipModuleUnload(CUmodule module) {
  ENTER();
  return mapped(DRIVER(cuModuleUnload)(module));
}
API int hipModuleLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                              unsigned grid_z, unsigned block_x, unsigned block_y,
                              unsigned block_z, unsigned shared, CUstream stream,
                              void** arguments, void** extra) {
  ENTER();
  return mapped(DRIVER(cuLaunchKernel)(function, grid_x, grid_y, grid_z, block_x, block_y,
                                       block_z, shared, stream, arguments, extra));
}

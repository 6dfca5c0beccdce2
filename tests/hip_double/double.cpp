// A strict double of libamdhip64.so for CPUs. It implements only the calls that ficco makes.
//
// Streams are threads, waits poll, and device memory is in memfds that other processes map. Uses
// that the API allows or leaves undefined, but that fail on hardware, are violations: the call
// fails and prints a line to stderr. double_violations and double_leaks return the numbers of
// violations and leaks. A process with a violation or a leak aborts at its end.
//
// Settings are environment variables, read when the library is loaded, or double_* calls:
//   HIP_DOUBLE_DEVICES=8       number of devices
//   HIP_DOUBLE_PEER=1          whether devices can access each other
//   HIP_DOUBLE_WAIT=1          hipDeviceAttributeCanUseStreamWaitValue
//   HIP_DOUBLE_WAIT_ANY=0      whether streams wait on memory other than signals; AMD's runtime
//                              does by default, but the API does not promise it
//   HIP_DOUBLE_SIGNAL_IPC=1    whether signal memory can be shared between processes
//   HIP_DOUBLE_PEER_WRITE=1    whether a stream write reaches the memory of another process
//   HIP_DOUBLE_NO_WRITE=from:to  writes of device `from` do not reach processes on device `to`
//   HIP_DOUBLE_2D=1            whether hipMemcpy2DAsync is supported
//   HIP_DOUBLE_HW_QUEUES=0     hardware queues per priority, which streams share as in AMD's
//                              runtime. Work runs in order of arrival. 0: one queue per stream
//   HIP_DOUBLE_CAPTURE_WRITES=1  whether graphs capture stream writes and waits; AMD's runtime
//                              executed them immediately until July 2026
//   HIP_DOUBLE_VERSION=70253211
//   HIP_DOUBLE_FAIL=call:code:first[:count]  `count` calls fail, from number `first`; 1 is the next
//   HIP_DOUBLE_JITTER_US=0     largest random sleep before each operation of a queue
//
// double_delay delays all operations of one queue; double_lose removes the memory of a peer;
// double_hold lets the calls of one function block until another call of double_hold.
//
// The types of the prototypes are those of the binding's declarations; enumerations are ints.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

enum Error {
  Success = 0,
  InvalidValue = 1,
  OutOfMemory = 2,
  InvalidPitchValue = 12,
  InvalidDevicePointer = 17,
  InvalidMemcpyDirection = 21,
  NoDevice = 100,
  InvalidDevice = 101,
  InvalidContext = 201,
  InvalidHandle = 400,
  NotFound = 500,
  NotReady = 600,
  IllegalAddress = 700,
  PeerAccessAlreadyEnabled = 704,
  PeerAccessNotEnabled = 705,
  LaunchFailure = 719,
  NotSupported = 801,
  CaptureUnsupported = 900,
  CaptureInvalidated = 901,
  CaptureMerge = 902,
  CaptureUnmatched = 903,
  CaptureUnjoined = 904,
  CaptureIsolation = 905,
  CapturedEvent = 907,
  Unknown = 999,
};

const std::map<int, std::pair<const char*, const char*>> NAMES = {
    {Success, {"hipSuccess", "no error"}},
    {InvalidValue, {"hipErrorInvalidValue", "invalid argument"}},
    {OutOfMemory, {"hipErrorOutOfMemory", "out of memory"}},
    {InvalidPitchValue, {"hipErrorInvalidPitchValue", "invalid pitch argument"}},
    {InvalidDevicePointer, {"hipErrorInvalidDevicePointer", "invalid device pointer"}},
    {InvalidMemcpyDirection, {"hipErrorInvalidMemcpyDirection", "invalid copy direction"}},
    {NoDevice, {"hipErrorNoDevice", "no ROCm-capable device is detected"}},
    {InvalidDevice, {"hipErrorInvalidDevice", "invalid device ordinal"}},
    {InvalidContext, {"hipErrorInvalidContext", "invalid device context"}},
    {InvalidHandle, {"hipErrorInvalidHandle", "invalid resource handle"}},
    {NotFound, {"hipErrorNotFound", "named symbol not found"}},
    {NotReady, {"hipErrorNotReady", "device not ready"}},
    {IllegalAddress, {"hipErrorIllegalAddress", "an illegal memory access was encountered"}},
    {PeerAccessAlreadyEnabled,
     {"hipErrorPeerAccessAlreadyEnabled", "peer access is already enabled"}},
    {PeerAccessNotEnabled, {"hipErrorPeerAccessNotEnabled", "peer access has not been enabled"}},
    {LaunchFailure, {"hipErrorLaunchFailure", "unspecified launch failure"}},
    {NotSupported, {"hipErrorNotSupported", "operation not supported"}},
    {CaptureUnsupported,
     {"hipErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"}},
    {CaptureInvalidated,
     {"hipErrorStreamCaptureInvalidated", "operation failed due to a previous error in capture"}},
    {CaptureMerge, {"hipErrorStreamCaptureMerge", "a merge of two captures"}},
    {CaptureUnmatched, {"hipErrorStreamCaptureUnmatched", "capture was not begun on this stream"}},
    {CaptureUnjoined, {"hipErrorStreamCaptureUnjoined", "a capture with unjoined streams"}},
    {CaptureIsolation,
     {"hipErrorStreamCaptureIsolation", "a dependency on work outside of the capture"}},
    {CapturedEvent, {"hipErrorCapturedEvent", "the event was last recorded in a capture"}},
    {Unknown, {"hipErrorUnknown", "unknown error"}},
};

long setting(const char* name, long fallback) {
  const char* text = getenv((std::string("HIP_DOUBLE_") + name).c_str());
  return text && *text ? atol(text) : fallback;
}

struct Settings {
  int devices = setting("DEVICES", 8);
  bool peer = setting("PEER", 1);
  bool wait = setting("WAIT", 1);
  bool wait_any = setting("WAIT_ANY", 0);
  bool signal_ipc = setting("SIGNAL_IPC", 1);
  bool peer_write = setting("PEER_WRITE", 1);
  bool rectangles = setting("2D", 1);
  size_t hw_queues = setting("HW_QUEUES", 0);
  bool capture_writes = setting("CAPTURE_WRITES", 1);
  int version = setting("VERSION", 70253211);
  std::atomic<long> jitter_us{setting("JITTER_US", 0)};
  int unwritten_from = -1, unwritten_to = -1;

  Settings() {
    if (const char* text = getenv("HIP_DOUBLE_NO_WRITE"))
      sscanf(text, "%d:%d", &unwritten_from, &unwritten_to);
  }
};

Settings& settings() {
  static Settings* instance = new Settings;
  return *instance;
}

thread_local int current_device = 0;
thread_local int last_error = 0;  // until hipGetLastError

int latch(int code) {
  if (code) last_error = code;
  return code;
}

std::atomic<int> violations{0};
std::mutex saying;
std::string said;  // all violations and leaks, for messages

int violation(Error code, const char* format, ...) {
  violations++;
  char text[512];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  fprintf(stderr, "hip double: violation: %s\n", text);
  fflush(stderr);
  std::lock_guard<std::mutex> lock(saying);
  said += std::string(text) + "\n";
  return latch(code);
}

// Injected failures.

struct Failure {
  int code;
  long first, count;
};

std::mutex failing;
std::map<std::string, Failure>& failures() {
  static auto* instance = new std::map<std::string, Failure>;
  return *instance;
}

std::map<std::string, long>& counts() {
  static auto* instance = new std::map<std::string, long>;
  return *instance;
}

void fail_on_purpose(const char* call, int code, long first, long count) {
  std::lock_guard<std::mutex> lock(failing);
  failures()[call] = {code, first, count};
}

void read_failures() {
  const char* text = getenv("HIP_DOUBLE_FAIL");
  if (!text) return;
  char call[64];
  int code;
  long first = 1, count = 1;
  if (sscanf(text, "%63[^:]:%d:%ld:%ld", call, &code, &first, &count) >= 2)
    fail_on_purpose(call, code, first, count);
}

// Count a call; return the error to inject, or 0.
int injected(const char* call) {
  static std::once_flag once;
  std::call_once(once, read_failures);
  std::lock_guard<std::mutex> lock(failing);
  counts()[call]++;
  auto entry = failures().find(call);
  if (entry == failures().end()) return 0;
  auto& failure = entry->second;
  if (--failure.first >= 1 || failure.count <= 0) return 0;
  failure.count--;
  return failure.code;
}

std::mutex holding;
std::condition_variable let_go;
std::string held;

// Block while the function is held.
void wait_if_held(const char* call) {
  std::unique_lock<std::mutex> lock(holding);
  let_go.wait(lock, [call] { return held != call; });
}

thread_local bool in_host_function = false;

#define ENTER(name)                                                                    \
  do {                                                                                 \
    if (in_host_function)                                                              \
      return violation(NotSupported, "%s called from a host function of a queue", name); \
    wait_if_held(name);                                                                \
    if (int code = injected(name)) return latch(code);                                 \
  } while (0)

std::atomic<int> sticky{0};  // as on a GPU, all later calls fail after an error of a queue

// Memory. A header of 64 bytes, shared by all processes, precedes every allocation.

constexpr size_t HEADER = 64, SMALL = 64, ARENA = 1 << 16, PAGE = 4096;
constexpr uint64_t MAGIC = 0x6669'6363'6f68'6970;

enum Kind { Device, Fine, Signal, Uncached, Host, Adopted, Code };
const char* const KINDS[] = {"device", "fine-grained", "signal", "uncached",
                             "host",   "adopted",      "code"};

struct Header {
  uint64_t magic;
  uint64_t serial;
  std::atomic<int> openers;
  std::atomic<int> alive;
};
static_assert(sizeof(Header) <= HEADER);

struct Backing {
  int fd = -1;
  char* base = nullptr;
  size_t nbytes = 0;
  ino_t inode = 0;
  std::vector<size_t> vacant;  // granules of an arena

  ~Backing() {
    if (base) munmap(base, nbytes);
    if (fd >= 0) close(fd);
  }
};

// Memory in the address space of this process: its own, or mapped from another process.
struct Memory {
  char* start;
  size_t nbytes;
  Kind kind;
  int device;  // device of the owner, -1 for host memory
  bool mapped = false;
  int pid;
  int opened = 0;
  size_t offset = 0;
  std::shared_ptr<Backing> backing;
  std::atomic<int> pending{0};  // number of queued operations that use it

  Header* header() const { return reinterpret_cast<Header*>(start - HEADER); }
};

std::mutex table;
std::map<char*, std::shared_ptr<Memory>>& memories() {
  static auto* instance = new std::map<char*, std::shared_ptr<Memory>>;
  return *instance;
}
std::vector<std::shared_ptr<Backing>>& arenas() {
  static auto* instance = new std::vector<std::shared_ptr<Backing>>;
  return *instance;
}
std::map<std::pair<int, ino_t>, std::weak_ptr<Backing>>& mappings() {
  static auto* instance = new std::map<std::pair<int, ino_t>, std::weak_ptr<Backing>>;
  return *instance;
}
uint64_t serials = 0;
std::set<int> lost;  // processes whose memory is lost

std::shared_ptr<Backing> backing_of(size_t nbytes) {
  auto backing = std::make_shared<Backing>();
  backing->fd = memfd_create("hip double", MFD_CLOEXEC);
  if (backing->fd < 0 || ftruncate(backing->fd, nbytes)) return nullptr;
  void* base = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, backing->fd, 0);
  if (base == MAP_FAILED) return nullptr;
  backing->base = static_cast<char*>(base);
  backing->nbytes = nbytes;
  struct stat file;
  fstat(backing->fd, &file);
  backing->inode = file.st_ino;
  return backing;
}

int allocate(void** target, size_t nbytes, Kind kind) {
  if (!target) return InvalidValue;
  *target = nullptr;
  if (!nbytes) return Success;
  std::lock_guard<std::mutex> lock(table);
  std::shared_ptr<Backing> backing;
  size_t offset = PAGE;
  if (nbytes <= SMALL) {
    for (auto& arena : arenas())
      if (!arena->vacant.empty()) backing = arena;
    if (!backing) {
      backing = backing_of(ARENA);
      if (!backing) return OutOfMemory;
      for (size_t at = 0; at < ARENA; at += HEADER + SMALL) backing->vacant.push_back(at + HEADER);
      arenas().push_back(backing);
    }
    offset = backing->vacant.back();
    backing->vacant.pop_back();
    memset(backing->base + offset, 0xA5, SMALL);  // garbage, as in new device memory
  } else {
    backing = backing_of(PAGE + nbytes);
    if (!backing) return OutOfMemory;
    memset(backing->base + PAGE, 0xA5, nbytes);
  }
  auto allocation = std::make_shared<Memory>();
  allocation->start = backing->base + offset;
  allocation->nbytes = nbytes;
  allocation->kind = kind;
  allocation->device = kind == Host ? -1 : current_device;
  allocation->pid = getpid();
  allocation->offset = offset;
  allocation->backing = backing;
  new (allocation->header()) Header{MAGIC, ++serials, {0}, {1}};
  memories()[allocation->start] = allocation;
  *target = allocation->start;
  return Success;
}

int release(void* pointer, bool host, const char* call) {
  if (!pointer) return Success;
  std::lock_guard<std::mutex> lock(table);
  auto entry = memories().find(static_cast<char*>(pointer));
  if (entry == memories().end())
    return violation(InvalidValue, "%s of %p, which is no allocation", call, pointer);
  auto memory = entry->second;
  if (memory->mapped || memory->kind == Adopted || (memory->kind == Host) != host)
    return violation(InvalidValue, "%s of %s memory%s", call, KINDS[memory->kind],
                     memory->mapped ? " of another process" : "");
  if (memory->pending && !sticky)
    return violation(InvalidValue, "%s of %s memory while a queue uses it", call,
                     KINDS[memory->kind]);
  if (int openers = memory->header()->openers)
    return violation(InvalidValue, "%s of %s memory that is mapped by %d other processes", call,
                     KINDS[memory->kind], openers);
  memory->header()->alive = 0;
  if (memory->nbytes <= SMALL) memory->backing->vacant.push_back(memory->offset);
  memories().erase(entry);
  return Success;
}

// The allocation that contains all bytes of a range.
std::shared_ptr<Memory> holder(const void* pointer, size_t nbytes) {
  auto* at = static_cast<char*>(const_cast<void*>(pointer));
  std::lock_guard<std::mutex> lock(table);
  auto entry = memories().upper_bound(at);
  if (entry == memories().begin()) return nullptr;
  auto memory = std::prev(entry)->second;
  return at + nbytes <= memory->start + memory->nbytes ? memory : nullptr;
}

std::set<std::pair<int, int>> peers;  // (device, peer) with access enabled

// Queues.


struct Marker {
  std::atomic<bool> over{false};
  std::chrono::steady_clock::time_point when;
};

struct Capture;

struct Event {
  int device;
  unsigned flags;
  std::shared_ptr<Marker> marker;
  // Position of the record in a capture: after `count` nodes of a lane.
  std::shared_ptr<Capture> capture;
  size_t lane = 0, count = 0;
};

struct Stream;
using Uses = std::vector<std::shared_ptr<Memory>>;
thread_local std::shared_ptr<Memory> launched;  // code of the kernel that this thread enqueues

struct Work {
  std::function<void()> run;
  std::function<bool()> ready;  // if set, polled before `run`
  Uses uses;
  long turn = 0;  // position in the hardware queue
};

// Work of streams during a capture; each stream has a lane. A node runs after the earlier nodes of
// its lane and, if `after` is set, after the first `count` nodes of another lane.
struct Node {
  Work work;
  bool after = false;
  size_t lane = 0, count = 0;
};

struct Capture {
  uint64_t id;
  int mode;
  std::thread::id thread;
  Stream* origin;
  bool invalid = false, ended = false;
  std::vector<Stream*> streams;
  std::vector<std::vector<Node>> lanes;
};

std::atomic<uint64_t> captures{0};
std::mutex capturing;  // guards all captures; taken before `table`
std::vector<std::shared_ptr<Capture>>& open_captures() {
  static auto* instance = new std::vector<std::shared_ptr<Capture>>;
  return *instance;
}
thread_local int capture_mode = 0;  // 2 is relaxed

// The capture that an unsafe call would invalidate, or null.
std::shared_ptr<Capture> forbidding() {
  std::lock_guard<std::mutex> lock(capturing);
  if (capture_mode == 2) return nullptr;
  for (auto& capture : open_captures())
    if ((capture->mode == 0 && capture_mode == 0) ||
        (capture->mode < 2 && capture->thread == std::this_thread::get_id()))
      return capture;
  return nullptr;
}

#define UNSAFE(name)                                                                       \
  do {                                                                                     \
    if (auto capture = forbidding()) {                                                     \
      capture->invalid = true;                                                             \
      return violation(CaptureUnsupported, "%s during a capture, in a mode that forbids it", name); \
    }                                                                                      \
  } while (0)

void late() {
  thread_local std::mt19937 random(getpid() * 31 + reinterpret_cast<uintptr_t>(&random) % 1000);
  if (long most = settings().jitter_us)
    std::this_thread::sleep_for(std::chrono::microseconds(random() % (most + 1)));
}

// Poll until a condition holds, the queue ends or an error is sticky. A pause is a quarter of the
// wait so far, so that on few cores waiting queues leave time to working queues.
void poll(const std::function<bool()>& ready, const std::function<bool()>& ending) {
  using namespace std::chrono;
  const auto began = steady_clock::now();
  for (int round = 0; !sticky && !ready(); round++) {
    if (round < 4) {
      std::this_thread::yield();
      continue;
    }
    auto waited = duration_cast<microseconds>(steady_clock::now() - began);
    std::this_thread::sleep_for(std::clamp<microseconds>(waited / 4, 20us, 1000us));
    if (ending()) return;
  }
}

void perform(Work& work, const std::function<bool()>& ending) {
  late();
  if (work.ready) poll(work.ready, ending);
  if (ending()) return;
  for (auto& memory : work.uses)
    if (memory->mapped && lost.count(memory->pid)) sticky = LaunchFailure;
  if (!sticky) work.run();
  for (auto& memory : work.uses) memory->pending--;
}

// A hardware queue, which streams of a priority share. Work runs in order of arrival.
struct Hardware {
  std::atomic<long> come{0}, over{0};
  size_t users = 0;
};

// The hardware queue of a device and priority with the fewest streams; the caller holds `table`.
std::shared_ptr<Hardware> hardware(int device, int priority) {
  static auto* pools = new std::map<std::pair<int, int>, std::vector<std::shared_ptr<Hardware>>>;
  auto& pool = (*pools)[{device, priority}];
  if (!settings().hw_queues) return std::make_shared<Hardware>();
  if (pool.size() < settings().hw_queues) pool.push_back(std::make_shared<Hardware>());
  return *std::min_element(pool.begin(), pool.end(),
                           [](auto& a, auto& b) { return a->users < b->users; });
}

struct Stream {
  int device;
  std::shared_ptr<Hardware> queue;
  std::mutex lock;
  std::condition_variable wake;
  std::deque<Work> work;
  bool busy = false, ending = false;
  std::shared_ptr<Capture> capture;  // its current capture, guarded by `capturing`
  size_t lane = 0;
  std::atomic<long> delay_us{0};  // before each operation
  std::thread thread;

  Stream(int device_, std::shared_ptr<Hardware> queue_) : device(device_), queue(queue_) {
    queue->users++;
    thread = std::thread([this] { serve(); });
  }

  void serve() {
    current_device = device;
    auto over = [this] {
      std::lock_guard<std::mutex> held(lock);
      return ending;
    };
    while (true) {
      Work next;
      {
        std::unique_lock<std::mutex> held(lock);
        wake.wait(held, [this] { return ending || !work.empty(); });
        if (ending) return;
        next = std::move(work.front());
        work.pop_front();
        busy = true;
      }
      poll([&] { return queue->over == next.turn; }, over);
      if (long us = delay_us) std::this_thread::sleep_for(std::chrono::microseconds(us));
      perform(next, over);
      if (over()) return;
      queue->over++;
      next = Work{};
      std::lock_guard<std::mutex> held(lock);
      busy = false;
    }
  }

  // Enqueue work, or append it to the current capture of the stream.
  void add(Work next) {
    if (launched) next.uses.push_back(launched);
    {
      std::lock_guard<std::mutex> held(capturing);
      if (capture) {
        capture->lanes[lane].push_back({std::move(next)});
        return;
      }
    }
    for (auto& memory : next.uses) memory->pending++;
    std::lock_guard<std::mutex> held(lock);
    next.turn = queue->come++;
    work.push_back(std::move(next));
    wake.notify_one();
  }

  // The caller holds `capturing`.
  void join(std::shared_ptr<Capture> into) {
    lane = into->lanes.size();
    into->streams.push_back(this);
    into->lanes.emplace_back();
    capture = std::move(into);
  }

  bool idle() {
    std::lock_guard<std::mutex> held(lock);
    return !busy && work.empty();
  }
};

// Graphs and executable graphs, by address.
struct Graph {
  std::shared_ptr<Capture> capture;
  bool executable;
};
std::map<void*, std::unique_ptr<Graph>>& graphs() {
  static auto* instance = new std::map<void*, std::unique_ptr<Graph>>;
  return *instance;
}

// Run a graph: a thread per lane, whose nodes wait for nodes of other lanes.
void replay(Capture& capture, int device) {
  std::vector<std::atomic<size_t>> done(capture.lanes.size());
  std::vector<std::thread> threads;
  auto never = [] { return false; };
  for (size_t lane = 0; lane < capture.lanes.size(); lane++)
    threads.emplace_back([&, lane] {
      current_device = device;
      for (auto& node : capture.lanes[lane]) {
        if (node.after) poll([&] { return done[node.lane] >= node.count; }, never);
        perform(node.work, never);
        done[lane]++;
      }
    });
  for (auto& thread : threads) thread.join();
}

std::map<void*, std::shared_ptr<Stream>>& streams() {
  static auto* instance = new std::map<void*, std::shared_ptr<Stream>>;
  return *instance;
}
std::map<void*, std::shared_ptr<Event>>& events() {
  static auto* instance = new std::map<void*, std::shared_ptr<Event>>;
  return *instance;
}

// The stream of a handle; null if the calling thread may not use it, with the error in `code`.
std::shared_ptr<Stream> queue(void* handle, const char* call, int& code) {
  std::shared_ptr<Stream> stream;
  {
    std::lock_guard<std::mutex> lock(table);
    auto entry = streams().find(handle);
    if (entry != streams().end()) stream = entry->second;
  }
  if (!stream) {
    code = violation(InvalidHandle, "%s on %p, which is no stream", call, handle);
    return nullptr;
  }
  if (stream->device != current_device) {
    code = violation(InvalidDevice, "%s on a stream of device %d by a thread on device %d", call,
                     stream->device, current_device);
    return nullptr;
  }
  code = sticky;
  return code ? nullptr : stream;
}

// The memory of a range; null if a stream may not access it, with the error in `code`.
std::shared_ptr<Memory> reach(Stream& stream, const void* pointer, size_t nbytes, const char* call,
                              int& code) {
  auto memory = holder(pointer, nbytes);
  if (!memory) {
    code = violation(InvalidValue, "%s of %zu bytes at %p, which is no memory of a device", call,
                     nbytes, pointer);
    return nullptr;
  }
  if (memory->mapped && !memory->header()->alive) {
    code = violation(InvalidValue, "%s of memory that its process has freed", call);
    return nullptr;
  }
  if (memory->device >= 0 && memory->device != stream.device) {
    std::lock_guard<std::mutex> lock(table);
    if (!peers.count({stream.device, memory->device})) {
      code = violation(PeerAccessNotEnabled, "%s by device %d of memory of device %d, before peer "
                       "access", call, stream.device, memory->device);
      return nullptr;
    }
  }
  return memory;
}

std::shared_ptr<Capture> capture_of(Stream& stream) {
  std::lock_guard<std::mutex> lock(capturing);
  return stream.capture;
}

// Prepare a copy of a stream as work.
int prepare(const char* call, Stream& stream, void* target, size_t target_pitch,
            const void* source, size_t source_pitch, size_t width, size_t height, int kind,
            Work& work) {
  int code = 0;
  if (height > 1 && (width > target_pitch || width > source_pitch))
    return violation(InvalidPitchValue, "%s: rows of %zu bytes at pitches %zu and %zu", call,
                     width, target_pitch, source_pitch);
  auto to = reach(stream, target, (height - 1) * target_pitch + width, call, code);
  if (!to) return code;
  auto from = reach(stream, source, (height - 1) * source_pitch + width, call, code);
  if (!from) return code;
  bool device_to = to->device >= 0, device_from = from->device >= 0;
  bool fits = kind == 4 || (device_from ? (device_to ? kind == 3 || kind == 1024 : kind == 2)
                                        : (device_to ? kind == 1 : kind == 0));
  if (!fits)
    return violation(InvalidMemcpyDirection, "%s of kind %d from %s to %s memory", call, kind,
                     KINDS[from->kind], KINDS[to->kind]);
  auto run = [=] {
    // Other threads poll the word of a signal during the copy.
    if (width == 4 && height == 1 && reinterpret_cast<uintptr_t>(target) % 4 == 0) {
      uint32_t value;
      memcpy(&value, source, 4);
      __atomic_store_n(static_cast<uint32_t*>(target), value, __ATOMIC_RELEASE);
      return;
    }
    for (size_t row = 0; row < height; row++)
      memcpy(static_cast<char*>(target) + row * target_pitch,
             static_cast<const char*>(source) + row * source_pitch, width);
    std::atomic_thread_fence(std::memory_order_release);
  };
  work = {run, nullptr, {to, from}};
  return Success;
}

int copy(const char* call, void* target, size_t target_pitch, const void* source,
         size_t source_pitch, size_t width, size_t height, int kind, void* handle) {
  int code = 0;
  auto stream = queue(handle, call, code);
  if (!stream) return code;
  if (!width || !height) return Success;
  Work work;
  code = prepare(call, *stream, target, target_pitch, source, source_pitch, width, height, kind,
                 work);
  if (!code) stream->add(std::move(work));
  return code;
}

int write_value(const char* call, void* handle, void* pointer, uint64_t value, int width) {
  int code = 0;
  auto stream = queue(handle, call, code);
  if (!stream) return code;
  if (reinterpret_cast<uintptr_t>(pointer) % width)
    return violation(InvalidValue, "%s at %p, which is not aligned", call, pointer);
  auto memory = reach(*stream, pointer, width, call, code);
  if (!memory) return code;
  bool refused = stream->device == settings().unwritten_from &&
                 memory->device == settings().unwritten_to;
  if (memory->mapped && (refused || !settings().peer_write)) return latch(InvalidValue);
  auto run = [=] {
    if (width == 4)
      __atomic_store_n(static_cast<uint32_t*>(pointer), static_cast<uint32_t>(value),
                       __ATOMIC_RELEASE);
    else
      __atomic_store_n(static_cast<uint64_t*>(pointer), value, __ATOMIC_RELEASE);
  };
  if (!settings().capture_writes && capture_of(*stream))
    run();
  else
    stream->add({run, nullptr, {memory}});
  return Success;
}

// Handles of memory for other processes.
struct Handle {
  uint64_t magic, serial, nbytes, offset, inode;
  int pid, fd, device, kind;
};
struct IpcMemHandle {
  char reserved[64];
};
static_assert(sizeof(Handle) <= sizeof(IpcMemHandle));

// Kernels, known by name only. A module is memory of its code.
struct Function {
  std::string name;
  std::shared_ptr<Memory> code;
};
std::map<void*, std::vector<std::unique_ptr<Function>>>& modules() {
  static auto* instance = new std::map<void*, std::vector<std::unique_ptr<Function>>>;
  return *instance;
}

int leaks() {
  std::lock_guard<std::mutex> lock(table);
  std::string report;
  for (auto& [start, memory] : memories()) {
    bool own = memory->kind != Adopted && !memory->mapped;
    if (own && memory->header()->openers) continue;  // the fault of another process
    report += "leak: " + std::to_string(memory->nbytes) + " bytes of " + KINDS[memory->kind] +
             " memory" + (memory->mapped ? ", mapped from another process\n" : "\n");
  }
  for (size_t i = 0; i < streams().size(); i++) report += "leak: a stream\n";
  for (size_t i = 0; i < events().size(); i++) report += "leak: an event\n";
  for (size_t i = 0; i < graphs().size(); i++) report += "leak: a graph\n";
  fputs(report.c_str(), stderr);
  fflush(stderr);
  std::lock_guard<std::mutex> talking(saying);
  said += report;
  return std::count(report.begin(), report.end(), '\n');
}


constexpr int WORDS = 64;
struct Words {
  uint64_t at[WORDS];
  uint32_t value[WORDS];
};

constexpr int ENDS = 16;
struct Ends {
  char *dst[ENDS], *src[ENDS];
};

template <typename T>
T argument(void** arguments, int index) {
  T value;
  memcpy(&value, arguments[index], sizeof value);
  return value;
}

// The words of a signal kernel. Their memory must be coherent between processes.
int signal_words(Stream& stream, void** arguments, Words& words, uint32_t& count, Uses& uses) {
  words = argument<Words>(arguments, 0);
  count = argument<uint32_t>(arguments, 1);
  for (uint32_t i = 0; i < count; i++) {
    int code = 0;
    auto memory = reach(stream, reinterpret_cast<void*>(words.at[i]), 4, "a signal kernel", code);
    if (!memory) return code;
    if (memory->kind == Device)
      return violation(InvalidValue, "a signal kernel on memory that devices cache");
    uses.push_back(memory);
  }
  return Success;
}

// Sums.

constexpr int PARTS = 16;
struct Parts {
  const char* at[PARTS];
};
struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

float widened(float value) { return value; }
float widened(Bf16 value) {
  uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}
float widened(F16 value) {
  int exponent = value.bits >> 10 & 31, fraction = value.bits & 1023;
  float result = exponent == 31 ? (fraction ? NAN : INFINITY)
                : exponent     ? std::ldexp(1024.0f + fraction, exponent - 25)
                               : std::ldexp(static_cast<float>(fraction), -24);
  return value.bits >> 15 ? -result : result;
}

// Round to nearest, ties to even.
void round_to(float value, float& to) { to = value; }
void round_to(float value, Bf16& to) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  to.bits = std::isnan(value) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
void round_to(float value, F16& to) {
  float size = std::fabs(value);
  int exponent = -13;  // subnormal numbers have the spacing of the smallest normal numbers
  if (size >= 0x1p-14f) std::frexp(size, &exponent);
  uint32_t bits = 0x7c00;
  if (std::isnan(value))
    bits = 0x7e00;
  else if (size < 65520)
    bits = ((exponent + 13) << 10) + std::lrint(std::ldexp(size, 11 - exponent));
  to.bits = bits | (std::signbit(value) << 15);
}

// Sum parts in order in float, and round once. Rows have `width` elements, at distances of `pitch`
// in the parts and `out_pitch` in the result. The first `vectors` units of 16 bytes of the result
// are addressed by units, as in the kernel.
template <typename In, typename Out>
int reduce(Stream& stream, uint32_t blocks, void** arguments) {
  constexpr uint64_t EACH = 16 / sizeof(Out);
  auto* out = argument<char*>(arguments, 0);
  auto parts = argument<Parts>(arguments, 1);
  auto count = argument<uint32_t>(arguments, 2), grid = argument<uint32_t>(arguments, 3);
  size_t vectors = argument<uint64_t>(arguments, 4), elements = argument<uint64_t>(arguments, 5);
  size_t width = argument<uint64_t>(arguments, 6), pitch = argument<uint64_t>(arguments, 7);
  size_t out_pitch = argument<uint64_t>(arguments, 8);
  float factor = argument<float>(arguments, 9);
  if (!count || count > PARTS || !elements || !width || elements % width || grid != blocks ||
      vectors * EACH > elements)
    return violation(InvalidValue, "a sum of %u parts of %zu elements, %zu of them by vectors, in "
                     "rows of %zu, by %u blocks of %u", count, elements, vectors * EACH, width,
                     blocks, grid);
  bool apart = width != pitch || width != out_pitch;
  if (vectors && apart && (width % EACH || pitch % EACH || out_pitch % EACH))
    return violation(InvalidValue, "a sum by vectors of rows of %zu, %zu and %zu apart", width,
                     pitch, out_pitch);
  Uses uses;
  for (uint32_t i = 0; i <= count; i++) {
    bool last = i == count;
    const char* at = last ? out : parts.at[i];
    size_t size = last ? sizeof(Out) : sizeof(In);
    size_t reached = (elements / width - 1) * (last ? out_pitch : pitch) + width;
    if (reinterpret_cast<uintptr_t>(at) % (vectors ? 16 : size))
      return violation(InvalidValue, "a sum at %p, which is not aligned", at);
    int code = 0;
    auto memory = reach(stream, at, reached * size, "a sum", code);
    if (!memory) return code;
    uses.push_back(memory);
  }
  auto run = [=] {
    for (size_t n = 0; n < elements; n++) {
      size_t each = n < vectors * EACH ? EACH : 1;
      auto place = [=](size_t rows_apart) {
        if (width == rows_apart) return n;
        size_t unit = n / each, units = width / each;
        return (unit / units * (rows_apart / each) + unit % units) * each + n % each;
      };
      float sum = -0.0f;
      for (uint32_t p = 0; p < count; p++)
        sum += widened(reinterpret_cast<const In*>(parts.at[p])[place(pitch)]);
      round_to(sum * factor, reinterpret_cast<Out*>(out)[place(out_pitch)]);
    }
    std::atomic_thread_fence(std::memory_order_release);
  };
  stream.add({run, nullptr, uses});
  return Success;
}

// Casts to e4m3.

// Round to the nearest e4m3, ties to even; values do not exceed the largest e4m3.
uint8_t e4m3(float value, bool fnuz) {
  if (std::isnan(value)) return fnuz ? 0x80 : 0x7f;
  int least = fnuz ? -7 : -6, exponent = least + 1;  // of normal numbers; by frexp's convention
  float size = std::fabs(value);
  if (size >= std::ldexp(1.0f, least)) std::frexp(size, &exponent);
  auto steps = std::lrint(std::ldexp(size, 4 - exponent));  // 8 to 16 for normal numbers
  uint8_t bits = (exponent - least - 1) * 8 + steps;
  return bits || !fnuz ? bits | (std::signbit(value) ? 0x80 : 0) : 0;
}

// Cast rows. `length` elements share a factor, the smallest power of two that does not overflow.
template <typename In>
int cast(Stream& stream, uint32_t blocks, void** arguments) {
  auto* out = argument<uint8_t*>(arguments, 0);
  auto* factors = argument<float*>(arguments, 2);
  auto* in = argument<const In*>(arguments, 4);
  size_t out_pitch = argument<uint64_t>(arguments, 1), pitch = argument<uint64_t>(arguments, 5);
  size_t factor_pitch = argument<uint64_t>(arguments, 3);
  size_t rows = argument<uint32_t>(arguments, 6), cols = argument<uint32_t>(arguments, 7);
  size_t length = argument<uint32_t>(arguments, 8);
  auto team = argument<uint32_t>(arguments, 9), fnuz = argument<uint32_t>(arguments, 10);
  auto aligned = argument<uint32_t>(arguments, 11), grid = argument<uint32_t>(arguments, 12);
  auto at = reinterpret_cast<uintptr_t>(in);
  if (!rows || !cols || !length || cols % 16 || grid != blocks || !team || team > 256 ||
      (team & (team - 1)) || (aligned && (at % 16 || pitch * sizeof(In) % 16)))
    return violation(InvalidValue, "a cast of %zu x %zu by %zu, teams of %u and %u blocks of %u",
                     rows, cols, length, team, blocks, grid);
  size_t parts = (cols + length - 1) / length;
  Uses uses;
  for (auto [from, bytes] :
       {std::pair<const void*, size_t>{out, (rows - 1) * out_pitch + cols},
        std::pair<const void*, size_t>{factors, ((rows - 1) * factor_pitch + parts) * 4},
        std::pair<const void*, size_t>{in, ((rows - 1) * pitch + cols) * sizeof(In)}}) {
    int code = 0;
    auto memory = reach(stream, static_cast<const char*>(from), bytes, "a cast", code);
    if (!memory) return code;
    uses.push_back(memory);
  }
  auto run = [=] {
    for (size_t row = 0; row < rows; row++)
      for (size_t part = 0; part < parts; part++) {
        size_t first = part * length, last = std::min(cols, first + length);
        double most = 0;
        for (size_t n = first; n < last; n++) {
          float size = std::fabs(widened(in[row * pitch + n]));
          most = size > most || std::isnan(size) ? size : most;
        }
        double factor = std::isfinite(most) ? 0x1p-126 : most;
        while (std::isfinite(most) && most > factor * (fnuz ? 240 : 448)) factor *= 2;
        factors[row * factor_pitch + part] = factor;
        for (size_t n = first; n < last; n++)
          out[row * out_pitch + n] = e4m3(
              std::isfinite(most) ? widened(in[row * pitch + n]) / factor : NAN, fnuz);
      }
    std::atomic_thread_fence(std::memory_order_release);
  };
  stream.add({run, nullptr, uses});
  return Success;
}

// Merges of parts of attention.

struct Strides {
  uint64_t batch, head, row;
};
struct Means {
  const char* at[PARTS];
  const float* lse[PARTS];
  Strides strides[PARTS], lse_strides[PARTS];
};

// Mean of parts with the weights of their log-sum-exp, in float and rounded once.
template <typename T>
int merge(Stream& stream, uint32_t blocks, void** arguments) {
  auto* out = argument<T*>(arguments, 0);
  auto out_strides = argument<Strides>(arguments, 1), lse_strides = argument<Strides>(arguments, 3);
  auto* lse = argument<float*>(arguments, 2);
  auto parts = argument<Means>(arguments, 4);
  auto count = argument<uint32_t>(arguments, 5), grid = argument<uint32_t>(arguments, 10);
  size_t units = argument<uint32_t>(arguments, 6), heads = argument<uint32_t>(arguments, 7);
  size_t rows = argument<uint32_t>(arguments, 8), total = argument<uint64_t>(arguments, 9);
  size_t each = units * heads * rows, size = units * 16 / sizeof(T);
  if (!count || count > PARTS || !each || !total || total % each || grid != blocks)
    return violation(InvalidValue, "a merge of %u parts of %zu units, %zu a batch, by %u blocks "
                     "of %u", count, total, each, blocks, grid);
  size_t batch = total / each;
  auto reached = [=](const Strides& by) {
    return (batch - 1) * by.batch + (heads - 1) * by.head + (rows - 1) * by.row;
  };
  Uses uses;
  for (uint32_t i = 0; i <= count; i++) {
    bool last = i == count;
    const char* at = last ? reinterpret_cast<const char*>(out) : parts.at[i];
    const float* weights = last ? lse : parts.lse[i];
    if (reinterpret_cast<uintptr_t>(at) % 16)
      return violation(InvalidValue, "a merge at %p, which is not aligned", at);
    size_t bytes = (reached(last ? out_strides : parts.strides[i]) + size) * sizeof(T);
    size_t bytes_of_lse = (reached(last ? lse_strides : parts.lse_strides[i]) + 1) * 4;
    for (auto [from, length] : {std::pair<const char*, size_t>{at, bytes},
                                {reinterpret_cast<const char*>(weights), bytes_of_lse}}) {
      if (!from && last) continue;  // the caller does not request the log-sum-exp
      int code = 0;
      auto memory = reach(stream, from, length, "a merge", code);
      if (!memory) return code;
      uses.push_back(memory);
    }
  }
  auto run = [=] {
    for (size_t n = 0; n < batch * heads * rows; n++) {
      size_t row = n % rows, head = n / rows % heads, of = n / rows / heads;
      auto along = [=](const Strides& by) { return of * by.batch + head * by.head + row * by.row; };
      float most = -INFINITY, all = 0;
      for (uint32_t p = 0; p < count; p++)
        most = std::max(most, parts.lse[p][along(parts.lse_strides[p])]);
      std::vector<float> sum(size);
      for (uint32_t p = 0; p < count; p++) {
        float weight = std::exp(parts.lse[p][along(parts.lse_strides[p])] - most);
        auto* from = reinterpret_cast<const T*>(parts.at[p]) + along(parts.strides[p]);
        for (size_t e = 0; e < size; e++) sum[e] += weight * widened(from[e]);
        all += weight;
      }
      for (size_t e = 0; e < size; e++) round_to(sum[e] / all, out[along(out_strides) + e]);
      if (lse) lse[along(lse_strides)] = most + std::log(all);
    }
    std::atomic_thread_fence(std::memory_order_release);
  };
  stream.add({run, nullptr, uses});
  return Success;
}

// For each pair of token and choice, its number among the pairs of its expert, and its row.
int route(Stream& stream, uint32_t blocks, void** arguments) {
  auto* places = argument<uint64_t*>(arguments, 0);
  auto* rows = argument<uint64_t*>(arguments, 1);
  auto* held = argument<uint64_t*>(arguments, 2);
  auto* counts = argument<uint64_t*>(arguments, 3);
  auto* chosen = argument<const uint64_t*>(arguments, 4);
  size_t by_token = argument<uint64_t>(arguments, 5), by_choice = argument<uint64_t>(arguments, 6);
  size_t tokens = argument<uint64_t>(arguments, 7), pairs = argument<uint64_t>(arguments, 8);
  size_t capacity = argument<uint64_t>(arguments, 9), experts = argument<uint32_t>(arguments, 10);
  if (!tokens || !pairs || pairs % tokens || experts != blocks)
    return violation(InvalidValue, "a route of %zu pairs of %zu tokens to %zu experts, by %u blocks",
                     pairs, tokens, experts, blocks);
  size_t read = (tokens - 1) * by_token + (pairs / tokens - 1) * by_choice + 1;
  Uses uses;
  for (auto [from, length] : {std::pair<const void*, size_t>{places, pairs}, {rows, pairs},
                              {held, pairs}, {counts, experts}, {chosen, read}}) {
    int code = 0;
    auto memory = reach(stream, from, length * 8, "a route", code);
    if (!memory) return code;
    uses.push_back(memory);
  }
  auto run = [=] {
    size_t row = 0;
    for (size_t expert = 0; expert < experts; expert++) {
      size_t place = 0;
      for (size_t pair = 0; pair < pairs; pair++) {
        if (chosen[pair % tokens * by_token + pair / tokens * by_choice] != expert) continue;
        places[pair] = place;
        if (capacity) {
          rows[pair] = place < capacity ? expert * capacity + place : experts * capacity;
        } else {
          held[row] = pair % tokens;
          rows[pair] = row++;
        }
        place++;
      }
      counts[expert] = place;
    }
    std::atomic_thread_fence(std::memory_order_release);
  };
  stream.add({run, nullptr, uses});
  return Success;
}

// SiLU or ReLU of the first half of each row, times the second half.
template <typename T, bool SILU>
int gated(Stream& stream, uint32_t blocks, void** arguments) {
  auto* out = argument<T*>(arguments, 0);
  size_t out_batch = argument<uint64_t>(arguments, 1), out_row = argument<uint64_t>(arguments, 2);
  auto* in = argument<const T*>(arguments, 3);
  size_t in_batch = argument<uint64_t>(arguments, 4), in_row = argument<uint64_t>(arguments, 5);
  size_t rows = argument<uint32_t>(arguments, 6), units = argument<uint32_t>(arguments, 7);
  size_t total = argument<uint64_t>(arguments, 8), grid = argument<uint32_t>(arguments, 9);
  if (!units || !rows || !total || total % (units * rows) || grid != blocks)
    return violation(InvalidValue, "gates of %zu units, %zu rows of %zu, by %u blocks of %zu",
                     total, rows, units, blocks, grid);
  size_t batches = total / units / rows, cols = units * 16 / sizeof(T);
  size_t reached = (batches - 1) * out_batch + (rows - 1) * out_row + cols;
  size_t read = (batches - 1) * in_batch + (rows - 1) * in_row + 2 * cols;
  Uses uses;
  for (auto [from, length] : {std::pair<const void*, size_t>{out, reached * sizeof(T)},
                              {in, read * sizeof(T)}}) {
    if (reinterpret_cast<uintptr_t>(from) % 16)
      return violation(InvalidValue, "gates at %p, which is not aligned", from);
    int code = 0;
    auto memory = reach(stream, from, length, "gates", code);
    if (!memory) return code;
    uses.push_back(memory);
  }
  auto run = [=] {
    for (size_t n = 0; n < batches * rows; n++) {
      const T* from = in + n / rows * in_batch + n % rows * in_row;
      T* to = out + n / rows * out_batch + n % rows * out_row;
      for (size_t e = 0; e < cols; e++) {
        float x = widened(from[e]);
        float held = SILU ? x / (1 + std::exp(-x)) : x < 0 ? 0 : x;
        round_to(held * widened(from[cols + e]), to[e]);
      }
    }
    std::atomic_thread_fence(std::memory_order_release);
  };
  stream.add({run, nullptr, uses});
  return Success;
}

// Weighted sums of the rows that tokens pick, in float and rounded once.
template <typename T>
int combine(Stream& stream, uint32_t blocks, void** arguments) {
  auto* out = argument<T*>(arguments, 0);
  auto* rows = argument<const T*>(arguments, 1);
  auto* picked = argument<const uint64_t*>(arguments, 2);
  size_t by_token = argument<uint64_t>(arguments, 3), by_choice = argument<uint64_t>(arguments, 4);
  auto* weights = argument<const float*>(arguments, 5);
  size_t choices = argument<uint32_t>(arguments, 6), units = argument<uint32_t>(arguments, 7);
  size_t total = argument<uint64_t>(arguments, 8), grid = argument<uint32_t>(arguments, 9);
  if (!units || !total || total % units || grid != blocks)
    return violation(InvalidValue, "a combination of %zu units, %zu a row, by %u blocks of %zu",
                     total, units, blocks, grid);
  size_t tokens = total / units, size = units * 16 / sizeof(T);
  for (const void* at : {static_cast<const void*>(out), static_cast<const void*>(rows)})
    if (reinterpret_cast<uintptr_t>(at) % 16)
      return violation(InvalidValue, "a combination at %p, which is not aligned", at);
  size_t numbers = (tokens - 1) * by_token + (choices ? choices - 1 : 0) * by_choice + 1;
  Uses uses;
  for (auto [from, length] : {std::pair<const void*, size_t>{out, tokens * size * sizeof(T)},
                              {choices ? picked : nullptr, numbers * 8},
                              {choices ? weights : nullptr, tokens * choices * 4}}) {
    if (!from) continue;
    int code = 0;
    auto memory = reach(stream, from, length, "a combination", code);
    if (!memory) return code;
    uses.push_back(memory);
  }
  auto run = [=] {
    for (size_t t = 0; t < tokens; t++) {
      std::vector<float> sum(size);
      for (size_t c = 0; c < choices; c++) {
        auto* from = rows + picked[t * by_token + c * by_choice] * size;
        float weight = weights ? weights[t * choices + c] : 1.0f;
        for (size_t e = 0; e < size; e++) sum[e] += weight * widened(from[e]);
      }
      for (size_t e = 0; e < size; e++) round_to(sum[e], out[t * size + e]);
    }
    std::atomic_thread_fence(std::memory_order_release);
  };
  stream.add({run, nullptr, uses});
  return Success;
}

using Launch = int (*)(Stream&, uint32_t, void**);
const std::map<std::string, Launch> ARITHMETIC = {
    {"ficco_reduce_bfloat16_bfloat16", reduce<Bf16, Bf16>},
    {"ficco_reduce_float16_float16", reduce<F16, F16>},
    {"ficco_reduce_float32_float32", reduce<float, float>},
    {"ficco_reduce_float32_bfloat16", reduce<float, Bf16>},
    {"ficco_reduce_float32_float16", reduce<float, F16>},
    {"ficco_cast_bfloat16", cast<Bf16>},
    {"ficco_cast_float16", cast<F16>},
    {"ficco_cast_float32", cast<float>},
    {"ficco_cast_short_bfloat16", cast<Bf16>},
    {"ficco_cast_short_float16", cast<F16>},
    {"ficco_cast_short_float32", cast<float>},
    {"ficco_merge_bfloat16", merge<Bf16>},
    {"ficco_merge_float16", merge<F16>},
    {"ficco_combine_bfloat16", combine<Bf16>},
    {"ficco_combine_float16", combine<F16>},
    {"ficco_route", route},
    {"ficco_silu_gated_bfloat16", gated<Bf16, true>},
    {"ficco_silu_gated_float16", gated<F16, true>},
    {"ficco_relu_gated_bfloat16", gated<Bf16, false>},
    {"ficco_relu_gated_float16", gated<F16, false>},
};

// Names of the other kernels. The last ten can be loaded, but do not run.
const std::set<std::string> KERNELS = {
    "ficco_post",
    "ficco_wait",
    "ficco_copy_aligned",
    "ficco_copy_shifted",
    "ficco_exchange_aligned",
    "ficco_exchange_shifted",
    "ficco_copy_runs",
    "ficco_one_shot_bfloat16",
    "ficco_one_shot_float16",
    "ficco_one_shot_float32",
    "ficco_two_shot_bfloat16",
    "ficco_two_shot_float16",
    "ficco_two_shot_float32",
    "ficco_script",
};

int launch(const std::string& name, Stream& stream, uint32_t blocks, void** arguments) {
  if (auto it = ARITHMETIC.find(name); it != ARITHMETIC.end())
    return it->second(stream, blocks, arguments);
  Words words;
  uint32_t count;
  Uses uses;
  if (name == "ficco_post") {
    if (int code = signal_words(stream, arguments, words, count, uses)) return code;
    stream.add({[=] {
                  for (uint32_t i = 0; i < count; i++)
                    __atomic_store_n(reinterpret_cast<uint32_t*>(words.at[i]), words.value[i],
                                     __ATOMIC_RELEASE);
                },
                nullptr, uses});
    return Success;
  }
  if (name == "ficco_wait") {
    if (int code = signal_words(stream, arguments, words, count, uses)) return code;
    auto limit = argument<uint64_t>(arguments, 3);  // ticks of 10 ns
    auto begin = std::make_shared<std::chrono::steady_clock::time_point>();
    auto ready = [=] {
      auto now = std::chrono::steady_clock::now();
      if (begin->time_since_epoch().count() == 0) *begin = now;
      if (static_cast<uint64_t>((now - *begin).count()) / 10 > limit) return true;
      for (uint32_t i = 0; i < count; i++)
        if (__atomic_load_n(reinterpret_cast<uint32_t*>(words.at[i]), __ATOMIC_ACQUIRE) !=
            words.value[i])
          return false;
      return true;
    };
    stream.add({[] {}, ready, uses});
    return Success;
  }
  if (name == "ficco_copy_aligned" || name == "ficco_copy_shifted") {
    auto ends = argument<Ends>(arguments, 0);
    auto target_pitch = argument<uint64_t>(arguments, 1);
    auto source_pitch = argument<uint64_t>(arguments, 2);
    auto width = argument<uint64_t>(arguments, 3);
    size_t height = argument<uint32_t>(arguments, 7);
    uint32_t each = argument<uint32_t>(arguments, 8), count = blocks / each;
    if (!count || blocks % each || count > ENDS)
      return violation(InvalidValue, "%u blocks of copies that have %u each", blocks, each);
    for (uint32_t i = 0; i < count; i++) {
      int code = 0;
      for (auto [at, pitch] :
           {std::pair{ends.dst[i], target_pitch}, std::pair{ends.src[i], source_pitch}}) {
        auto memory = reach(stream, at, (height - 1) * pitch + width, "a copy kernel", code);
        if (!memory) return code;
        uses.push_back(memory);
      }
    }
    stream.add({[=] {
                  for (uint32_t i = 0; i < count; i++)
                    for (size_t row = 0; row < height; row++)
                      memcpy(ends.dst[i] + row * target_pitch, ends.src[i] + row * source_pitch,
                             width);
                  std::atomic_thread_fence(std::memory_order_release);
                },
                nullptr, uses});
    return Success;
  }
  return violation(NotSupported, "kernel %s, which the double does not carry out", name.c_str());
}

struct AtExit {
  ~AtExit() {
    int leaked = leaks();
    if (leaked || violations) {
      fprintf(stderr, "hip double: %d leaks and %d violations\n", leaked, violations.load());
      abort();
    }
  }
} at_exit;

}  // namespace

// For tests.

API int double_violations() { return violations.exchange(0); }
// Texts of violations and leaks since the previous call.
API const char* double_said() {
  static thread_local std::string text;
  std::lock_guard<std::mutex> lock(saying);
  text = std::exchange(said, "");
  return text.c_str();
}
// Names of all calls so far, one per line.
API const char* double_called() {
  static thread_local std::string text;
  std::lock_guard<std::mutex> lock(failing);
  text = "";
  for (auto& [name, count] : counts())
    if (!name.empty()) text += name + "\n";
  return text.c_str();
}
API int double_leaks() { return leaks(); }
API void double_fail(const char* call, int code, long first, long count) {
  injected("");  // reads the failures of the environment first
  fail_on_purpose(call, code, first, count);
}
API long double_calls(const char* call) {
  std::lock_guard<std::mutex> lock(failing);
  return counts()[call];
}
API void double_jitter(long most_us) { settings().jitter_us = most_us; }
// Delay each later operation of a queue by `us`; 0 ends the delay.
API int double_delay(void* stream, long us) {
  std::lock_guard<std::mutex> lock(table);
  auto entry = streams().find(stream);
  if (entry == streams().end()) return InvalidHandle;
  entry->second->delay_us = us;
  return Success;
}

// Let the calls of a function block, and no longer those of the function before it.
API void double_hold(const char* call) {
  std::lock_guard<std::mutex> lock(holding);
  held = call;
  let_go.notify_all();
}

// Make the memory of a process unreachable.
API void double_lose(int pid) {
  std::lock_guard<std::mutex> lock(table);
  lost.insert(pid);
}

// Treat host memory, the CPU tensors of the caller, as memory of the current device.
API int double_adopt(void* start, size_t nbytes) {
  std::lock_guard<std::mutex> lock(table);
  auto& memory = memories()[static_cast<char*>(start)];
  if (memory) {
    if (memory->kind != Adopted) return Success;  // a tensor in device memory
    if (memory->nbytes != nbytes)
      return violation(InvalidValue, "operands of %zu bytes where %zu are known", nbytes,
                       memory->nbytes);
    memory->opened++;
    return Success;
  }
  memory = std::make_shared<Memory>();
  memory->start = static_cast<char*>(start);
  memory->nbytes = nbytes;
  memory->kind = Adopted;
  memory->device = current_device;
  memory->pid = getpid();
  memory->opened = 1;
  return Success;
}
API int double_forget(void* start) {
  std::lock_guard<std::mutex> lock(table);
  auto entry = memories().find(static_cast<char*>(start));
  if (entry == memories().end() || entry->second->kind != Adopted) return InvalidValue;
  if (--entry->second->opened) return Success;
  int pending = entry->second->pending;
  memories().erase(entry);
  if (pending && !sticky) return violation(InvalidValue, "operands freed while in use");
  return Success;
}

// Devices.

API const char* hipGetErrorName(int code) {
  auto entry = NAMES.find(code);
  return entry == NAMES.end() ? "hipErrorUnknown" : entry->second.first;
}
API const char* hipGetErrorString(int code) {
  auto entry = NAMES.find(code);
  return entry == NAMES.end() ? "unknown error" : entry->second.second;
}
API int hipGetDeviceCount(int* count) {
  ENTER("hipGetDeviceCount");
  *count = settings().devices;
  return *count ? Success : NoDevice;
}
API int hipGetLastError() { return std::exchange(last_error, 0); }
API int hipRuntimeGetVersion(int* version) {
  ENTER("hipRuntimeGetVersion");
  *version = settings().version;
  return Success;
}
API int hipSetDevice(int device) {
  ENTER("hipSetDevice");
  if (device < 0 || device >= settings().devices) return InvalidDevice;
  current_device = device;
  return Success;
}
API int hipGetDevice(int* device) {
  ENTER("hipGetDevice");
  *device = current_device;
  return Success;
}
API int hipDeviceGetAttribute(int* value, int attribute, int device) {
  ENTER("hipDeviceGetAttribute");
  if (device < 0 || device >= settings().devices) return InvalidDevice;
  switch (attribute) {
    case 10013: *value = settings().wait; return Success;  // CanUseStreamWaitValue
    case 2: *value = 2; return Success;                    // AsyncEngineCount
    case 67: *value = device + 16; return Success;         // PciBusId
    case 68: case 69: *value = 0; return Success;          // PciDeviceId, PciDomainId
    case 63: *value = 304; return Success;                 // MultiprocessorCount
    case 10017: *value = 100000; return Success;           // WallClockRate, kHz
    default: return InvalidValue;
  }
}
API int hipDeviceCanAccessPeer(int* can, int device, int peer) {
  ENTER("hipDeviceCanAccessPeer");
  if (std::max(device, peer) >= settings().devices || std::min(device, peer) < 0)
    return InvalidDevice;
  *can = device != peer && settings().peer;
  return Success;
}
API int hipDeviceEnablePeerAccess(int peer, unsigned flags) {
  ENTER("hipDeviceEnablePeerAccess");
  if (flags) return InvalidValue;
  if (peer < 0 || peer >= settings().devices || peer == current_device || !settings().peer)
    return InvalidDevice;
  std::lock_guard<std::mutex> lock(table);
  return peers.insert({current_device, peer}).second ? Success : latch(PeerAccessAlreadyEnabled);
}

// Memory.

API int hipMalloc(void** pointer, size_t nbytes) {
  ENTER("hipMalloc");
  UNSAFE("hipMalloc");
  return allocate(pointer, nbytes, Device);
}
API int hipExtMallocWithFlags(void** pointer, size_t nbytes, unsigned flags) {
  ENTER("hipExtMallocWithFlags");
  UNSAFE("hipExtMallocWithFlags");
  if (flags == 2 && nbytes != 8)
    return violation(InvalidValue, "signal memory of %zu bytes; it comes by 8", nbytes);
  if (flags > 3) return InvalidValue;
  return allocate(pointer, nbytes, static_cast<Kind>(flags));
}
API int hipHostMalloc(void** pointer, size_t nbytes, unsigned) {
  ENTER("hipHostMalloc");
  UNSAFE("hipHostMalloc");
  return allocate(pointer, nbytes, Host);
}
// No mode allows frees during a capture: graphs may use the memory.
static bool in_capture() {
  std::lock_guard<std::mutex> lock(capturing);
  for (auto& capture : open_captures())
    if (capture->thread == std::this_thread::get_id()) return true;
  return false;
}
// A free waits for all queues of the device, as does closing a handle, and hangs if one of them
// hangs. AMD's runtime: SyncAllStreams in hip_memory.cpp.
static int settled(const char* call) {
  auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!sticky && std::chrono::steady_clock::now() < end) {
    bool idle = true;
    {
      std::lock_guard<std::mutex> lock(table);
      for (auto& [handle, stream] : streams())
        idle = idle && (stream->device != current_device || stream->idle());
    }
    if (idle) return Success;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return sticky ? Success : violation(Unknown, "%s while a queue does not end", call);
}
API int hipFree(void* pointer) {
  ENTER("hipFree");
  if (in_capture()) return violation(CaptureUnsupported, "hipFree during a capture");
  UNSAFE("hipFree");
  if (int code = settled("hipFree")) return code;
  return release(pointer, false, "hipFree");
}
API int hipHostFree(void* pointer) {
  ENTER("hipHostFree");
  UNSAFE("hipHostFree");
  if (int code = settled("hipHostFree")) return code;
  return release(pointer, true, "hipHostFree");
}
API int hipIpcGetMemHandle(IpcMemHandle* target, void* pointer) {
  ENTER("hipIpcGetMemHandle");
  std::lock_guard<std::mutex> lock(table);
  auto entry = memories().find(static_cast<char*>(pointer));
  if (entry == memories().end() || entry->second->mapped || entry->second->device < 0 ||
      entry->second->kind == Adopted)
    return violation(InvalidValue, "hipIpcGetMemHandle of %p, which is no device memory of this "
                     "process or not its beginning", pointer);
  auto& memory = *entry->second;
  if (memory.kind == Signal && !settings().signal_ipc) return latch(InvalidValue);
  Handle handle{MAGIC, memory.header()->serial, memory.nbytes, memory.offset,
                memory.backing->inode, getpid(), memory.backing->fd, memory.device, memory.kind};
  memset(target, 0, sizeof *target);
  memcpy(target, &handle, sizeof handle);
  return Success;
}
API int hipIpcOpenMemHandle(void** pointer, IpcMemHandle reference, unsigned flags) {
  ENTER("hipIpcOpenMemHandle");
  UNSAFE("hipIpcOpenMemHandle");
  Handle handle;
  memcpy(&handle, &reference, sizeof handle);
  *pointer = nullptr;
  if (handle.magic != MAGIC) return violation(InvalidHandle, "hipIpcOpenMemHandle of garbage");
  if (flags != 1) return violation(InvalidValue, "hipIpcOpenMemHandle with flags %u", flags);
  if (handle.pid == getpid())
    return violation(InvalidContext, "hipIpcOpenMemHandle in the process that made the handle");
  std::lock_guard<std::mutex> lock(table);
  auto& known = mappings()[{handle.pid, handle.inode}];
  auto backing = known.lock();
  if (!backing) {
    backing = std::make_shared<Backing>();
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
    backing->fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat file;
    if (backing->fd < 0 || fstat(backing->fd, &file) || file.st_ino != handle.inode)
      return violation(InvalidHandle, "hipIpcOpenMemHandle of memory that is gone");
    backing->nbytes = file.st_size;
    void* base =
        mmap(nullptr, file.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, backing->fd, 0);
    if (base == MAP_FAILED) return OutOfMemory;
    backing->base = static_cast<char*>(base);
    backing->inode = handle.inode;
    known = backing;
  }
  char* start = backing->base + handle.offset;
  auto* header = reinterpret_cast<Header*>(start - HEADER);
  if (!header->alive || header->serial != handle.serial)
    return violation(InvalidHandle, "hipIpcOpenMemHandle of memory that was freed");
  auto& memory = memories()[start];
  if (!memory) {
    memory = std::make_shared<Memory>();
    memory->start = start;
    memory->nbytes = handle.nbytes;
    memory->kind = static_cast<Kind>(handle.kind);
    memory->device = handle.device;
    memory->mapped = true;
    memory->pid = handle.pid;
    memory->offset = handle.offset;
    memory->backing = backing;
    header->openers++;
  }
  memory->opened++;
  *pointer = start;
  return Success;
}
API int hipIpcCloseMemHandle(void* pointer) {
  ENTER("hipIpcCloseMemHandle");
  UNSAFE("hipIpcCloseMemHandle");
  if (int code = settled("hipIpcCloseMemHandle")) return code;
  std::lock_guard<std::mutex> lock(table);
  auto entry = memories().find(static_cast<char*>(pointer));
  if (entry == memories().end() || !entry->second->mapped)
    return violation(InvalidValue, "hipIpcCloseMemHandle of %p, which is not open", pointer);
  auto memory = entry->second;
  if (memory->pending && !sticky)
    return violation(InvalidValue, "hipIpcCloseMemHandle while a queue uses the memory");
  if (--memory->opened) return Success;
  memory->header()->openers--;
  memories().erase(entry);
  return Success;
}

// Streams and events.

API int hipStreamCreateWithPriority(void** target, unsigned flags, int priority) {
  ENTER("hipStreamCreateWithPriority");
  UNSAFE("hipStreamCreateWithPriority");
  if (flags > 1 || priority < -1 || priority > 1) return InvalidValue;
  std::lock_guard<std::mutex> lock(table);
  auto stream = std::make_shared<Stream>(current_device, hardware(current_device, priority));
  streams()[stream.get()] = stream;
  *target = stream.get();
  return Success;
}
API int hipStreamDestroy(void* handle) {
  ENTER("hipStreamDestroy");
  UNSAFE("hipStreamDestroy");
  std::shared_ptr<Stream> stream;
  {
    std::lock_guard<std::mutex> lock(table);
    auto entry = streams().find(handle);
    if (entry == streams().end())
      return violation(InvalidHandle, "hipStreamDestroy of %p, which is no stream", handle);
    stream = entry->second;
    if (!stream->idle() && !sticky)
      return violation(InvalidHandle, "hipStreamDestroy of a stream that is not idle");
    stream->queue->users--;
    streams().erase(entry);
  }
  {
    std::lock_guard<std::mutex> held(stream->lock);
    stream->ending = true;
    stream->wake.notify_one();
  }
  stream->thread.join();
  return Success;
}
API int hipStreamQuery(void* handle) {
  ENTER("hipStreamQuery");
  UNSAFE("hipStreamQuery");
  int code = 0;
  auto stream = queue(handle, "hipStreamQuery", code);
  if (!stream) return code;
  if (auto capture = capture_of(*stream)) {
    capture->invalid = true;
    return violation(CaptureUnsupported, "hipStreamQuery of a stream that is being captured");
  }
  return latch(stream->idle() ? Success : NotReady);
}
API int hipEventCreateWithFlags(void** target, unsigned flags) {
  ENTER("hipEventCreateWithFlags");
  auto event = std::make_shared<Event>(Event{current_device, flags, nullptr, nullptr});
  std::lock_guard<std::mutex> lock(table);
  events()[event.get()] = event;
  *target = event.get();
  return Success;
}
static std::shared_ptr<Event> event_of(void* handle, const char* call, int& code) {
  std::lock_guard<std::mutex> lock(table);
  auto entry = events().find(handle);
  if (entry != events().end()) return entry->second;
  code = violation(InvalidHandle, "%s of %p, which is no event", call, handle);
  return nullptr;
}
API int hipEventDestroy(void* handle) {
  ENTER("hipEventDestroy");
  int code = 0;
  if (!event_of(handle, "hipEventDestroy", code)) return code;
  std::lock_guard<std::mutex> lock(table);
  events().erase(handle);
  return Success;
}
API int hipEventRecord(void* handle, void* on) {
  ENTER("hipEventRecord");
  int code = 0;
  auto event = event_of(handle, "hipEventRecord", code);
  if (!event) return code;
  auto stream = queue(on, "hipEventRecord", code);
  if (!stream) return code;
  if (event->device != stream->device)
    return violation(InvalidHandle, "hipEventRecord of an event of device %d on a stream of device "
                     "%d", event->device, stream->device);
  auto marker = std::make_shared<Marker>();
  {
    std::lock_guard<std::mutex> held(capturing);
    std::lock_guard<std::mutex> lock(table);
    event->marker = marker;
    event->capture = stream->capture;
    if (stream->capture) {
      event->lane = stream->lane;
      event->count = stream->capture->lanes[stream->lane].size();
      return Success;
    }
  }
  auto run = [=] {
    marker->when = std::chrono::steady_clock::now();
    marker->over = true;
  };
  stream->add({run, nullptr, {}});
  return Success;
}
API int hipStreamWaitEvent(void* on, void* handle, unsigned) {
  ENTER("hipStreamWaitEvent");
  int code = 0;
  auto event = event_of(handle, "hipStreamWaitEvent", code);
  if (!event) return code;
  auto stream = queue(on, "hipStreamWaitEvent", code);
  if (!stream) return code;
  std::shared_ptr<Marker> marker;
  {
    std::lock_guard<std::mutex> held(capturing);
    std::lock_guard<std::mutex> lock(table);
    marker = event->marker;
    auto& capture = event->capture;
    if (capture && capture->ended)
      return violation(CapturedEvent, "hipStreamWaitEvent for an event of a capture that is over");
    if (capture && stream->capture && stream->capture != capture)
      return violation(CaptureMerge, "hipStreamWaitEvent in one capture for another");
    if (stream->capture && marker && !capture)
      return violation(CaptureIsolation, "hipStreamWaitEvent in a capture for an event outside");
    if (capture) {
      if (!stream->capture) stream->join(capture);
      Node node{{[] {}, nullptr, {}}, true, event->lane, event->count};
      capture->lanes[stream->lane].push_back(std::move(node));
      return Success;
    }
  }
  if (marker)
    stream->add({[] {}, [=] { return marker->over.load(); }, {}});
  return Success;
}
API int hipEventQuery(void* handle) {
  ENTER("hipEventQuery");
  UNSAFE("hipEventQuery");
  int code = 0;
  auto event = event_of(handle, "hipEventQuery", code);
  if (!event) return code;
  std::lock_guard<std::mutex> lock(table);
  if (sticky) return sticky;
  if (event->capture)
    return violation(CapturedEvent, "hipEventQuery of an event that was recorded in a capture");
  return latch(!event->marker || event->marker->over ? Success : NotReady);
}
API int hipEventElapsedTime(float* ms, void* start, void* stop) {
  ENTER("hipEventElapsedTime");
  int code = 0;
  auto first = event_of(start, "hipEventElapsedTime", code);
  auto last = event_of(stop, "hipEventElapsedTime", code);
  if (!first || !last) return code;
  std::lock_guard<std::mutex> lock(table);
  if ((first->flags | last->flags) & 2 || !first->marker || !last->marker)
    return violation(InvalidHandle, "hipEventElapsedTime of events that keep no time");
  if (!first->marker->over || !last->marker->over) return NotReady;
  std::chrono::duration<float, std::milli> between = last->marker->when - first->marker->when;
  *ms = between.count();
  return Success;
}

// Operations of queues.

API int hipMemcpyDtoDAsync(void* target, void* source, size_t nbytes, void* stream) {
  ENTER("hipMemcpyDtoDAsync");
  return copy("hipMemcpyDtoDAsync", target, 0, source, 0, nbytes, 1, 3, stream);
}
API int hipMemcpyAsync(void* target, const void* source, size_t nbytes, int kind, void* stream) {
  ENTER("hipMemcpyAsync");
  return copy("hipMemcpyAsync", target, 0, source, 0, nbytes, 1, kind, stream);
}
API int hipMemcpyPeerAsync(void* target, int target_device, const void* source, int source_device,
                           size_t nbytes, void* stream) {
  ENTER("hipMemcpyPeerAsync");
  auto to = holder(target, nbytes), from = holder(source, nbytes);
  if (to && from && (to->device != target_device || from->device != source_device))
    return violation(InvalidDevice, "hipMemcpyPeerAsync from device %d to %d, but the memory is of "
                     "%d and %d", source_device, target_device, from->device, to->device);
  return copy("hipMemcpyPeerAsync", target, 0, source, 0, nbytes, 1, 3, stream);
}
API int hipMemcpy2DAsync(void* target, size_t target_pitch, const void* source,
                         size_t source_pitch, size_t width, size_t height, int kind,
                         void* stream) {
  ENTER("hipMemcpy2DAsync");
  if (!settings().rectangles) return latch(NotSupported);
  return copy("hipMemcpy2DAsync", target, target_pitch, source, source_pitch, width, height, kind,
              stream);
}

// The copies of a batch run in any order, after earlier work of the stream and before later work.
// Runtimes before HIP 7.12 keep the order of the batch and refuse attributes.
struct CopyAttributes {
  int source_order, source_kind, source_at, target_kind, target_at;
  unsigned flags;
};
API int hipMemcpyBatchAsync(void** targets, void** sources, size_t* sizes, size_t count,
                            const CopyAttributes* attributes, const size_t* firsts, size_t kinds,
                            size_t*, void* handle) {
  const char* call = "hipMemcpyBatchAsync";
  ENTER(call);
  int code = 0;
  auto stream = queue(handle, call, code);
  if (!stream) return code;
  if (!targets || !sources || !sizes || !count)
    return violation(InvalidValue, "%s of %zu copies", call, count);
  bool old = settings().version < 71200000;
  if (old && kinds) return latch(NotSupported);
  if (kinds && (!attributes || !firsts || firsts[0] || kinds > 1 || attributes->source_order != 1))
    return violation(InvalidValue, "%s whose sources are not all read in stream order", call);
  if (capture_of(*stream)) return violation(CaptureUnsupported, "%s in a capture", call);
  std::vector<Work> parts(count);
  Uses uses;
  auto meet = [&](void** left, size_t i, void** right, size_t j) {
    auto *a = static_cast<char*>(left[i]), *b = static_cast<char*>(right[j]);
    return a < b + sizes[j] && b < a + sizes[i];
  };
  for (size_t i = 0; i < count; i++) {
    if (!sizes[i]) return violation(InvalidValue, "%s: copy %zu has no bytes", call, i);
    code = prepare(call, *stream, targets[i], 0, sources[i], 0, sizes[i], 1, 3, parts[i]);
    if (code) return code;
    uses.insert(uses.end(), parts[i].uses.begin(), parts[i].uses.end());
    for (size_t j = 0; j < i; j++)
      if (meet(targets, i, targets, j) || meet(targets, i, sources, j) ||
          meet(sources, i, targets, j))
        return violation(InvalidValue, "%s: copies %zu and %zu depend on their order", call, j, i);
  }
  auto run = [parts = std::move(parts), old] {
    std::vector<const Work*> order;
    for (auto& part : parts) order.push_back(&part);
    thread_local std::mt19937 random(getpid());
    if (!old) std::shuffle(order.begin(), order.end(), random);
    for (auto* part : order) late(), part->run();
  };
  stream->add({run, nullptr, uses});
  return Success;
}
API int hipMemsetAsync(void* target, int value, size_t nbytes, void* handle) {
  ENTER("hipMemsetAsync");
  int code = 0;
  auto stream = queue(handle, "hipMemsetAsync", code);
  if (!stream) return code;
  auto memory = reach(*stream, target, nbytes, "hipMemsetAsync", code);
  if (!memory) return code;
  stream->add({[=] { memset(target, value, nbytes); }, nullptr, {memory}});
  return Success;
}
API int hipStreamWriteValue32(void* stream, void* pointer, uint32_t value, unsigned) {
  ENTER("hipStreamWriteValue32");
  return write_value("hipStreamWriteValue32", stream, pointer, value, 4);
}
API int hipStreamWaitValue32(void* handle, void* pointer, uint32_t value, unsigned flags,
                             uint32_t mask) {
  const char* call = "hipStreamWaitValue32";
  ENTER(call);
  if (!settings().wait)
    return violation(NotSupported, "%s, which this device does not offer", call);
  int code = 0;
  auto stream = queue(handle, call, code);
  if (!stream) return code;
  auto memory = reach(*stream, pointer, 4, call, code);
  if (!memory) return code;
  bool signal = memory->kind == Signal && pointer == memory->start && !memory->mapped;
  if (!signal && !(settings().wait_any && memory->kind >= Fine))
    return violation(InvalidValue, "%s on %s memory%s, which is no signal memory of this process",
                     call, KINDS[memory->kind], memory->mapped ? " of another process" : "");
  if (flags > 1 || !mask) return violation(InvalidValue, "%s with flags %u, mask %u", call, flags, mask);
  auto ready = [=] {
    uint32_t word = __atomic_load_n(static_cast<uint32_t*>(pointer), __ATOMIC_ACQUIRE) & mask;
    return flags == 1 ? word == value : static_cast<int32_t>(word - value) >= 0;
  };
  stream->add({[] {}, ready, {memory}});
  return Success;
}
API int hipLaunchHostFunc(void* handle, void (*function)(void*), void* argument) {
  ENTER("hipLaunchHostFunc");
  int code = 0;
  auto stream = queue(handle, "hipLaunchHostFunc", code);
  if (!stream) return code;
  auto run = [=] {
    in_host_function = true;
    function(argument);
    in_host_function = false;
  };
  stream->add({run, nullptr, {}});
  return Success;
}

// Graphs.

API int hipThreadExchangeStreamCaptureMode(int* mode) {
  ENTER("hipThreadExchangeStreamCaptureMode");
  if (*mode < 0 || *mode > 2)
    return violation(InvalidValue, "hipThreadExchangeStreamCaptureMode with mode %d", *mode);
  std::swap(*mode, capture_mode);
  return Success;
}
API int hipStreamBeginCapture(void* handle, int mode) {
  ENTER("hipStreamBeginCapture");
  int code = 0;
  auto stream = queue(handle, "hipStreamBeginCapture", code);
  if (!stream) return code;
  std::lock_guard<std::mutex> lock(capturing);
  if (stream->capture || mode < 0 || mode > 2)
    return violation(InvalidValue, "hipStreamBeginCapture on a stream in a capture, or mode %d",
                     mode);
  auto capture = std::make_shared<Capture>();
  capture->id = ++captures;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->origin = stream.get();
  open_captures().push_back(capture);
  stream->join(capture);
  return Success;
}
API int hipStreamIsCapturing(void* handle, int* status) {
  ENTER("hipStreamIsCapturing");
  int code = 0;
  auto stream = queue(handle, "hipStreamIsCapturing", code);
  if (!stream) return code;
  auto capture = capture_of(*stream);
  *status = capture ? 1 + capture->invalid : 0;
  return Success;
}
API int hipStreamGetCaptureInfo(void* handle, int* status, unsigned long long* id) {
  ENTER("hipStreamGetCaptureInfo");
  int code = 0;
  auto stream = queue(handle, "hipStreamGetCaptureInfo", code);
  if (!stream) return code;
  auto capture = capture_of(*stream);
  *status = capture ? 1 + capture->invalid : 0;
  if (id) *id = capture ? capture->id : 0;
  return Success;
}
API int hipStreamEndCapture(void* handle, void** graph) {
  ENTER("hipStreamEndCapture");
  int code = 0;
  *graph = nullptr;
  auto stream = queue(handle, "hipStreamEndCapture", code);
  if (!stream) return code;
  std::lock_guard<std::mutex> lock(capturing);
  auto capture = stream->capture;
  if (!capture || capture->origin != stream.get())
    return violation(CaptureUnmatched, "hipStreamEndCapture where no capture began");
  auto& open = open_captures();
  open.erase(std::find(open.begin(), open.end(), capture));
  capture->ended = true;
  for (auto* member : capture->streams) member->capture = nullptr;
  if (capture->invalid) return latch(CaptureInvalidated);
  // Number of nodes per lane that precede the end of the origin; other nodes are not joined.
  std::vector<size_t> joined(capture->lanes.size(), 0), seen(joined);
  joined[0] = capture->lanes[0].size();
  for (bool more = true; more;) {
    more = false;
    for (size_t lane = 0; lane < joined.size(); lane++)
      for (; seen[lane] < joined[lane]; seen[lane]++) {
        auto& node = capture->lanes[lane][seen[lane]];
        if (node.after && joined[node.lane] < node.count) joined[node.lane] = node.count;
        more = true;
      }
  }
  for (size_t lane = 0; lane < joined.size(); lane++)
    if (joined[lane] < capture->lanes[lane].size())
      return violation(CaptureUnjoined, "hipStreamEndCapture with a stream that was not joined");
  std::lock_guard<std::mutex> held(table);
  auto captured = std::make_unique<Graph>(Graph{capture, false});
  *graph = captured.get();
  graphs()[*graph] = std::move(captured);
  return Success;
}
static Graph* graph_of(void* handle, bool executable, const char* call, int& code) {
  std::lock_guard<std::mutex> lock(table);
  auto entry = graphs().find(handle);
  if (entry != graphs().end() && entry->second->executable == executable)
    return entry->second.get();
  code = violation(InvalidHandle, "%s of %p, which is no such graph", call, handle);
  return nullptr;
}
API int hipGraphInstantiateWithFlags(void** target, void* handle, unsigned long long flags) {
  ENTER("hipGraphInstantiateWithFlags");
  UNSAFE("hipGraphInstantiateWithFlags");
  int code = 0;
  auto* graph = graph_of(handle, false, "hipGraphInstantiateWithFlags", code);
  if (!graph) return code;
  if (flags) return latch(InvalidValue);
  std::lock_guard<std::mutex> lock(table);
  auto executable = std::make_unique<Graph>(Graph{graph->capture, true});
  *target = executable.get();
  graphs()[*target] = std::move(executable);
  return Success;
}
API int hipGraphLaunch(void* handle, void* on) {
  ENTER("hipGraphLaunch");
  int code = 0;
  auto* graph = graph_of(handle, true, "hipGraphLaunch", code);
  if (!graph) return code;
  auto stream = queue(on, "hipGraphLaunch", code);
  if (!stream) return code;
  auto capture = graph->capture;
  for (auto& lane : capture->lanes)
    for (auto& node : lane)
      for (auto& memory : node.work.uses) {
        std::lock_guard<std::mutex> lock(table);
        auto entry = memories().find(memory->start);
        if (entry == memories().end() || entry->second != memory)
          return violation(InvalidValue, "hipGraphLaunch: %s memory that it uses is gone",
                           KINDS[memory->kind]);
        memory->pending++;
      }
  int device = stream->device;
  stream->add({[=] { replay(*capture, device); }, nullptr, {}});
  return Success;
}
API int hipGraphDestroy(void* handle) {
  ENTER("hipGraphDestroy");
  int code = 0;
  if (!graph_of(handle, false, "hipGraphDestroy", code)) return code;
  std::lock_guard<std::mutex> lock(table);
  graphs().erase(handle);
  return Success;
}
API int hipGraphExecDestroy(void* handle) {
  ENTER("hipGraphExecDestroy");
  int code = 0;
  if (!graph_of(handle, true, "hipGraphExecDestroy", code)) return code;
  std::lock_guard<std::mutex> lock(table);
  graphs().erase(handle);
  return Success;
}

// Kernels.

API int hipModuleLoadData(void** module, const void* image) {
  ENTER("hipModuleLoadData");
  UNSAFE("hipModuleLoadData");
  if (!image) return InvalidValue;
  if (int code = allocate(module, SMALL, Code)) return code;
  std::lock_guard<std::mutex> lock(table);
  modules()[*module];
  return Success;
}
API int hipModuleGetFunction(void** function, void* module, const char* name) {
  ENTER("hipModuleGetFunction");
  std::lock_guard<std::mutex> lock(table);
  auto entry = modules().find(module);
  if (entry == modules().end())
    return violation(InvalidHandle, "hipModuleGetFunction of %p, which is no module", module);
  if (!ARITHMETIC.count(name) && !KERNELS.count(name)) return latch(NotFound);
  auto code = memories().at(static_cast<char*>(module));
  entry->second.push_back(std::make_unique<Function>(Function{name, code}));
  *function = entry->second.back().get();
  return Success;
}
API int hipModuleUnload(void* module) {
  ENTER("hipModuleUnload");
  UNSAFE("hipModuleUnload");
  {
    std::lock_guard<std::mutex> lock(table);
    if (!modules().count(module))
      return violation(InvalidHandle, "hipModuleUnload of %p, which is no module", module);
  }
  if (int code = release(module, false, "hipModuleUnload")) return code;
  std::lock_guard<std::mutex> lock(table);
  modules().erase(module);
  return Success;
}
API int hipModuleLaunchKernel(void* function, unsigned blocks, unsigned, unsigned, unsigned,
                              unsigned, unsigned, unsigned, void* handle, void** arguments, void** extra) {
  const char* call = "hipModuleLaunchKernel";
  ENTER(call);
  int code = 0;
  auto stream = queue(handle, call, code);
  if (!stream) return code;
  if (!arguments || extra) return violation(InvalidValue, "%s without arguments", call);
  auto* kernel = static_cast<Function*>(function);
  launched = kernel->code;
  code = launch(kernel->name, *stream, blocks, arguments);
  launched = nullptr;
  return code;
}

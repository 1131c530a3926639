// Launches runs of GPU kernels: one call from Python for all kernels between two calls of ATen.
// The driver is opened by name, so that this compiles where no GPU and no toolkit is.

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

namespace {

// The structs are words as Python's array writes them: every field has 8 bytes.

// A tensor map, made again when the address of its matrix changes.
struct Map {
  const uint64_t *address;  // where the address of the matrix stands
  uint64_t known;           // the address that the map was made for, with its offset; 0: none
  void *made;               // 128 bytes
  uint64_t offset;
  int64_t width;            // bytes of an element
  uint64_t rows, columns;
  uint64_t stride;          // bytes from a row to the next
  uint64_t block_rows, block_columns;
};

struct Record {
  void *function;           // null: fill memory instead
  int64_t num_threads;      // of a block; 0: a host call, whose fields mean what `call` says
  int64_t shared_bytes;
  const int64_t *grid;      // three numbers; of a fill, the first is the count of elements
  void **arguments;         // addresses of the values
  const uint64_t *memory;   // where the address to be filled stands
  uint64_t pattern;         // one element
  int64_t width;            // its bytes
  Map *maps;                // tensor maps among the arguments
  int64_t num_maps;
};

struct Segment {
  int64_t count;
  const Record *records;
  int64_t device;
};

using LaunchKernel = int (*)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                             unsigned, void *, void **, void **);
using Memset8 = int (*)(uint64_t, unsigned char, size_t, void *);
using Memset16 = int (*)(uint64_t, unsigned short, size_t, void *);
using Memset32 = int (*)(uint64_t, unsigned, size_t, void *);
using Memset2D32 = int (*)(uint64_t, size_t, unsigned, size_t, size_t, void *);

using EncodeTiled = int (*)(void *, int, unsigned, void *, const uint64_t *, const uint64_t *,
                            const unsigned *, const unsigned *, int, int, int, int);

struct Driver {
  bool is_hip;
  LaunchKernel launch;
  Memset8 memset8;
  Memset16 memset16;
  Memset32 memset32;
  Memset2D32 memset2d32;
  int (*load_module)(void **, const void *);
  int (*get_function)(void **, void *, const char *);
  int (*set_attribute)(void *, int, int);
  int (*set_cache_config)(void *, int);
  // CUDA only: a thread that has not used the GPU yet has no context.
  int (*get_device)(int *, int);
  int (*retain_context)(void **, int);
  int (*set_context)(void *);
  int (*set_device)(int);  // HIP's way to do the same
  int (*error_string)(int, const char **);
  const char *(*hip_error_string)(int);
  EncodeTiled encode_tiled;  // CUDA 12 and newer only
};

Driver driver;

constexpr int kUnsupported = 801;    // CUDA_ERROR_NOT_SUPPORTED, hipErrorNotSupported
constexpr int kInvalidContext = 201; // both drivers
constexpr int kMissing = -1;         // the driver or one of its functions is not there
constexpr int kMaxDynamicShared = 8, kPreferShared = 1;
constexpr int64_t kSharedWithoutAsking = 48 << 10;
// Of tensor maps: unsigned integers by width, rows of 128 bytes interleaved, fetched as such.
constexpr int kUnsigned8 = 0, kUnsigned16 = 1, kUnsigned32 = 2, kSwizzle128 = 3, kFetch128 = 2;

template <typename F> bool find(void *library, const char *name, F &into) {
  into = reinterpret_cast<F>(dlsym(library, name));
  return into != nullptr;
}

int open_cuda() {
  void *lib = dlopen("libcuda.so.1", RTLD_NOW);
  if (!lib) return kMissing;
  find(lib, "cuTensorMapEncodeTiled", driver.encode_tiled);
  bool all = find(lib, "cuLaunchKernel", driver.launch) &&
             find(lib, "cuMemsetD8Async", driver.memset8) &&
             find(lib, "cuMemsetD16Async", driver.memset16) &&
             find(lib, "cuMemsetD32Async", driver.memset32) &&
             find(lib, "cuMemsetD2D32Async", driver.memset2d32) &&
             find(lib, "cuModuleLoadData", driver.load_module) &&
             find(lib, "cuModuleGetFunction", driver.get_function) &&
             find(lib, "cuFuncSetAttribute", driver.set_attribute) &&
             find(lib, "cuFuncSetCacheConfig", driver.set_cache_config) &&
             find(lib, "cuDeviceGet", driver.get_device) &&
             find(lib, "cuDevicePrimaryCtxRetain", driver.retain_context) &&
             find(lib, "cuCtxSetCurrent", driver.set_context) &&
             find(lib, "cuGetErrorString", driver.error_string);
  return all ? 0 : kMissing;
}

int open_hip() {
  driver.is_hip = true;
  void *lib = dlopen("libamdhip64.so", RTLD_NOW);
  for (int version = 7; !lib && version >= 5; --version) {
    char name[] = "libamdhip64.so.0";
    name[sizeof(name) - 2] = static_cast<char>('0' + version);
    lib = dlopen(name, RTLD_NOW);
  }
  if (!lib) return kMissing;
  find(lib, "hipMemsetD2D32Async", driver.memset2d32);  // newer drivers only
  bool all = find(lib, "hipModuleLaunchKernel", driver.launch) &&
             find(lib, "hipMemsetD8Async", driver.memset8) &&
             find(lib, "hipMemsetD16Async", driver.memset16) &&
             find(lib, "hipMemsetD32Async", driver.memset32) &&
             find(lib, "hipModuleLoadData", driver.load_module) &&
             find(lib, "hipModuleGetFunction", driver.get_function) &&
             find(lib, "hipSetDevice", driver.set_device) &&
             find(lib, "hipGetErrorString", driver.hip_error_string);
  return all ? 0 : kMissing;
}

int make_current(int index) {
  if (driver.is_hip) return driver.set_device(index);
  int device = 0;
  void *context = nullptr;
  int code = driver.get_device(&device, index);
  if (!code) code = driver.retain_context(&context, device);
  return code ? code : driver.set_context(context);
}

int fill(const Record &r, void *stream) {
  uint64_t at = *r.memory;
  size_t count = static_cast<size_t>(r.grid[0]);
  if (!count) return 0;
  unsigned low = static_cast<unsigned>(r.pattern), high = static_cast<unsigned>(r.pattern >> 32);
  switch (r.width) {
  case 1: return driver.memset8(at, static_cast<unsigned char>(low), count, stream);
  case 2: return driver.memset16(at, static_cast<unsigned short>(low), count, stream);
  case 4: return driver.memset32(at, low, count, stream);
  }
  if (low == high) return driver.memset32(at, low, 2 * count, stream);
  if (!driver.memset2d32) return kUnsupported;
  int code = driver.memset2d32(at, 8, low, 1, count, stream);
  return code ? code : driver.memset2d32(at + 4, 8, high, 1, count, stream);
}

int encode(Map &m) {
  uint64_t at = *m.address + m.offset;
  if (at == m.known) return 0;
  if (!driver.encode_tiled) return kUnsupported;
  const uint64_t sizes[2] = {m.columns, m.rows}, strides[1] = {m.stride};
  const unsigned block[2] = {static_cast<unsigned>(m.block_columns),
                             static_cast<unsigned>(m.block_rows)};
  const unsigned steps[2] = {1, 1};
  int kind = m.width == 1 ? kUnsigned8 : m.width == 2 ? kUnsigned16 : kUnsigned32;
  int code = driver.encode_tiled(m.made, kind, 2, reinterpret_cast<void *>(at), sizes, strides,
                                 block, steps, 0, kSwizzle128, kFetch128, 0);
  if (!code) m.known = at;
  return code;
}

constexpr int64_t kMostPointers = 16;

using HostCall = int (*)(void *const *, const int64_t *, const double *, void *, void *);

// A function of another library, which launches on the stream: addresses with their offsets, sizes,
// factors and workspace.
int call(const Record &r, void *stream) {
  void *pointers[kMostPointers];
  if (r.shared_bytes > kMostPointers) return kUnsupported;
  for (int64_t k = 0; k < r.shared_bytes; ++k)
    pointers[k] = *static_cast<char **>(r.arguments[k]) + static_cast<int64_t>(r.memory[k]);
  return reinterpret_cast<HostCall>(r.function)(
      pointers, r.grid, reinterpret_cast<const double *>(r.pattern),
      reinterpret_cast<void *>(r.width), stream);
}

int run(const Record &r, void *stream) {
  if (!r.function) return fill(r, stream);
  if (!r.num_threads) return call(r, stream);
  const int64_t *g = r.grid;
  if (g[0] <= 0 || g[1] <= 0 || g[2] <= 0) return 0;
  for (int64_t k = 0; k < r.num_maps; ++k)
    if (int code = encode(r.maps[k])) return code;
  return driver.launch(r.function, static_cast<unsigned>(g[0]), static_cast<unsigned>(g[1]),
                       static_cast<unsigned>(g[2]), static_cast<unsigned>(r.num_threads), 1, 1,
                       static_cast<unsigned>(r.shared_bytes), stream, r.arguments, nullptr);
}

}  // namespace

// The driver of "cuda" (0) or "hip" (1); 0 where it is there.
extern "C" int pf_open(int is_hip) { return is_hip ? open_hip() : open_cuda(); }

// The function `symbol` of a code object, made ready for so much shared memory.
extern "C" int pf_load(const void *code, const char *symbol, int64_t shared_bytes, int device,
                       void **function) {
  void *module = nullptr;
  int status = make_current(device);
  if (!status) status = driver.load_module(&module, code);
  if (!status) status = driver.get_function(function, module, symbol);
  if (!status && !driver.is_hip && shared_bytes > kSharedWithoutAsking) {
    status = driver.set_cache_config(*function, kPreferShared);
    int wanted = static_cast<int>(shared_bytes);
    if (!status) status = driver.set_attribute(*function, kMaxDynamicShared, wanted);
  }
  return status;
}

// Every record of a segment in order; the driver's code of the first that fails, else 0.
extern "C" int pf_launch(const Segment *segment, void *stream) {
  for (int64_t k = 0; k < segment->count; ++k) {
    const Record &record = segment->records[k];
    int code = run(record, stream);
    if (code == kInvalidContext && !make_current(static_cast<int>(segment->device)))
      code = run(record, stream);
    if (code) return code;
  }
  return 0;
}

// What a code means, in the driver's words.
extern "C" const char *pf_error(int code) {
  if (driver.is_hip) return driver.hip_error_string ? driver.hip_error_string(code) : "";
  const char *text = nullptr;
  if (driver.error_string) driver.error_string(code, &text);
  return text ? text : "";
}

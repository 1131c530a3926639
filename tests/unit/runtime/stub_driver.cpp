// A GPU driver whose kernels run here: what the launcher passes is seen by functions of C++.
#include <cstdint>
#include <cstdio>
#include <cstring>

static int64_t num_launches, num_contexts;
static void *has_context;
static const char *image;

// float *x, float *y, int32 n, int64 stride, two scratch pointers: y[k] = x[k * stride] + n.
static void add(unsigned blocks, void **a) {
  float *x = *(float **)a[0], *y = *(float **)a[1];
  int32_t n = *(int32_t *)a[2];
  int64_t stride = *(int64_t *)a[3];
  bool is_null = !*(void **)a[4] && !*(void **)a[5];
  for (unsigned k = 0; k < blocks; ++k) y[k] = is_null ? x[k * stride] + n : -1;
}

// float *y, a tensor map, int32 rows and columns, int64 strides: y gets what the map was made of.
static void show(unsigned, void **a) {
  float *y = *(float **)a[0];
  const uint64_t *map = (const uint64_t *)a[1];
  for (int k = 0; k < 8; ++k) y[k] = map[k];
  y[8] = *(int32_t *)a[2], y[9] = *(int32_t *)a[3];
  y[10] = *(int64_t *)a[4], y[11] = *(int64_t *)a[5];
  y[12] = (uintptr_t)map % 64;
}

extern "C" {
int cuTensorMapEncodeTiled(void *map, int kind, unsigned rank, void *at, const uint64_t *sizes,
                           const uint64_t *strides, const unsigned *block, const unsigned *steps,
                           int interleave, int swizzle, int fetch, int fill) {
  static uint64_t count;
  uint64_t made[] = {*(uint32_t *)at, sizes[0], sizes[1], strides[0], block[0], block[1],
                     kind * 1000u + rank * 100 + swizzle * 10 + fetch, ++count};
  memcpy(map, made, sizeof(made));
  return interleave + fill + (steps[0] * steps[1] != 1);
}
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int) { *context = &has_context; return 0; }
int cuCtxSetCurrent(void *context) { has_context = context; ++num_contexts; return 0; }
int cuModuleLoadData(void **module, const void *data) {
  *module = &image;
  return memcmp(data, "CODE", 4) ? 200 : 0;
}
int cuModuleGetFunction(void **function, void *, const char *name) {
  *function = !strcmp(name, "add") ? (void *)&add : nullptr;
  if (!strcmp(name, "show")) *function = (void *)&show;
  return *function ? 0 : 500;
}
int cuFuncSetAttribute(void *, int attribute, int value) {
  return attribute == 8 && value <= 232448 ? 0 : 1;
}
int cuFuncSetCacheConfig(void *, int) { return 0; }
int cuGetErrorString(int code, const char **text) {
  *text = code == 700 ? "an illegal memory access was encountered" : "some error";
  return 0;
}
int cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned,
                   unsigned, unsigned shared, void *stream, void **args, void **) {
  if (!has_context) return 201;
  if (stream == (void *)13) return 700;
  ++num_launches;
  ((void (*)(unsigned, void **))f)(x * y * z * (threads == 128) * (shared == 65536), args);
  return 0;
}
int cuMemsetD8Async(uint64_t at, unsigned char v, size_t n, void *) { memset((void *)at, v, n); return 0; }
int cuMemsetD16Async(uint64_t at, unsigned short v, size_t n, void *) {
  for (size_t k = 0; k < n; ++k) ((unsigned short *)at)[k] = v;
  return 0;
}
int cuMemsetD32Async(uint64_t at, unsigned v, size_t n, void *) {
  for (size_t k = 0; k < n; ++k) ((unsigned *)at)[k] = v;
  return 0;
}
int cuMemsetD2D32Async(uint64_t at, size_t pitch, unsigned v, size_t width, size_t n, void *) {
  for (size_t k = 0; k < n; ++k)
    for (size_t j = 0; j < width; ++j) ((unsigned *)(at + k * pitch))[j] = v;
  return 0;
}
void forget_context() { has_context = nullptr; }
int64_t launches() { return num_launches; }
}

static void kernel0(const float* __restrict a0, float* __restrict a1, int threads) {
  const int64_t items = int64_t(1) * ((int64_t(16) + 63) / 64) * ((int64_t(24) + 31) / 32);
  if (int64_t(24) * int64_t(16) < 32768) threads = 1;
  if (items < threads) threads = items > 0 ? (int)items : 1;
  const auto body = [=](int thread, int threads) PF_INLINED {
    const int64_t begin = items * thread / threads;
    const int64_t end = items * (thread + 1) / threads;
    alignas(64) float tile0[2048];
    for (int64_t item = begin; item < end; ++item) {
      const int64_t blocks = ((int64_t(16) + 63) / 64);
      const int64_t first = item % blocks * 64;
      const int64_t row = item / blocks;
      const int64_t bands = ((int64_t(24) + 31) / 32);
      const int64_t top = row % bands * 32;
      const int64_t bottom = top + 32 < 24 ? top + 32 : 24;
      const int64_t plane = row / bands;
      const int wide = (int)(int64_t(16) - first < 64 ? int64_t(16) - first : 64);
      pf::transpose_tile<float>(a0 + top + 24*first, 24, tile0, 64, wide, (int)(bottom - top));
      for (int64_t x0 = top; x0 < bottom; ++x0) {
        {
          const int64_t last = first + 64 < int64_t(16) ? first + 64 : int64_t(16);
          int64_t at_x1 = first;
          for (; at_x1 + 8 <= last; at_x1 += 8) {
            {
              const int64_t x1 = at_x1 + 0;
              pf::storev<float>(a1 + 16*x0 + x1, pf::loadv<float>(tile0 + (x0 - top) * 64 + x1 - first));
            }
          }
        }
      }
    }
  };
  const int used = pf::parallel(threads, body);
  (void)used;
}

extern "C" void segment0(void** p, const int64_t* s) {
  kernel0((float*)p[1], (float*)p[2], (int)s[0]);
}

static void kernel0(const float* __restrict a0, float* __restrict a1, int threads) {
  const int64_t items = int64_t(1);
  if (int64_t(8) < 32768) threads = 1;
  if (items < threads) threads = items > 0 ? (int)items : 1;
  const auto body = [=](int thread, int threads) PF_INLINED {
    const int64_t begin = items * thread / threads;
    const int64_t end = items * (thread + 1) / threads;
    for (int64_t item = begin; item < end; ++item) {
      {
        int64_t at_x0 = 0;
        for (; at_x0 + 8 <= int64_t(8); at_x0 += 8) {
          {
            const int64_t x0 = at_x0 + 0;
            const auto t1 = pf::loadv<float>(a0 + x0);
            const auto t2 = pf::mul(t1, pf::splat(2.0f));
            const auto t3 = pf::add(t2, pf::splat(1.0f));
            pf::storev<float>(a1 + x0, t3);
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

static void kernel0(const float* __restrict a0, float* __restrict a1, int threads) {
  const int64_t items = int64_t(4);
  if (int64_t(4) * int64_t(24) < 32768) threads = 1;
  if (items < threads) threads = items > 0 ? (int)items : 1;
  const auto body = [=](int thread, int threads) PF_INLINED {
    const int64_t begin = items * thread / threads;
    const int64_t end = items * (thread + 1) / threads;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t x0 = item;
      pf::Sum<float> acc_m0_0, acc_m0_1, acc_m0_2, acc_m0_3;
      {
        int64_t at_x1 = 0;
        for (; at_x1 + 8 <= int64_t(24); at_x1 += 8) {
          {
            const int64_t x1 = at_x1 + 0;
            const auto t1 = pf::loadv<float>(a0 + 24*x0 + x1);
            acc_m0_0.step(t1);
          }
        }
      }
      acc_m0_0.merge(acc_m0_1);
      acc_m0_0.merge(acc_m0_2);
      acc_m0_0.merge(acc_m0_3);
      const auto t2 = acc_m0_0.finish();
      pf::store1<float>(a1 + x0, t2);
    }
  };
  const int used = pf::parallel(threads, body);
  (void)used;
}

extern "C" void segment0(void** p, const int64_t* s) {
  kernel0((float*)p[1], (float*)p[2], (int)s[0]);
}

static void kernel0(const float* __restrict a0, float* __restrict a1, int threads) {
  const int64_t items = int64_t(4);
  if (int64_t(4) * int64_t(24) < 8192) threads = 1;
  if (items < threads) threads = items > 0 ? (int)items : 1;
  const auto body = [=](int thread, int threads) PF_INLINED {
    const int64_t begin = items * thread / threads;
    const int64_t end = items * (thread + 1) / threads;
    char* const rows = pf::scratch(0, 192);
    float* const r0 = (float*)(rows + 0);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t x0 = item;
      pf::Max<float> acc_m0_0, acc_m0_1, acc_m0_2, acc_m0_3;
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
      pf::Sum<float> acc_m2_0, acc_m2_1;
      {
        int64_t at_x1 = 0;
        for (; at_x1 + 16 <= int64_t(24); at_x1 += 16) {
          {
            const int64_t x1 = at_x1 + 0;
            const auto t3 = pf::loadv<float>(a0 + 24*x0 + x1);
            const auto t4 = pf::sub(t3, pf::splat(t2));
            const auto t5 = pf::exp(t4);
            pf::storev<float>(r0 + x1, t5);
            acc_m2_0.step(t5);
          }
          {
            const int64_t x1 = at_x1 + 8;
            const auto t6 = pf::loadv<float>(a0 + 24*x0 + x1);
            const auto t7 = pf::sub(t6, pf::splat(t2));
            const auto t8 = pf::exp(t7);
            pf::storev<float>(r0 + x1, t8);
            acc_m2_1.step(t8);
          }
        }
        for (; at_x1 + 8 <= int64_t(24); at_x1 += 8) {
          {
            const int64_t x1 = at_x1 + 0;
            const auto t9 = pf::loadv<float>(a0 + 24*x0 + x1);
            const auto t10 = pf::sub(t9, pf::splat(t2));
            const auto t11 = pf::exp(t10);
            pf::storev<float>(r0 + x1, t11);
            acc_m2_0.step(t11);
          }
        }
      }
      acc_m2_0.merge(acc_m2_1);
      const auto t12 = acc_m2_0.finish();
      const auto t13 = pf::reciprocal(t12);
      {
        int64_t at_x1 = 0;
        for (; at_x1 + 8 <= int64_t(24); at_x1 += 8) {
          {
            const int64_t x1 = at_x1 + 0;
            const auto t14 = pf::mul(pf::loadv<float>(r0 + x1), pf::splat(t13));
            pf::storev<float>(a1 + 24*x0 + x1, t14);
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

// Runs an artefact of one float32 argument, and prints the elements of each result.
//
//     perfuse artefact compile examples/native/model.py:model --out model.perfuse --native
//     g++ -O2 -fopenmp -I perfuse/native examples/native/main.cpp perfuse/native/perfuse.cpp -ldl -o run_model
//     ./run_model model.perfuse 4 64
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "perfuse.h"

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s ARTEFACT [SIZE ...]\n", argv[0]);
    return 2;
  }
  try {
    perfuse::Artefact model(argv[1]);
    std::vector<int64_t> shape;
    for (int k = 2; k < argc; ++k) shape.push_back(std::atoll(argv[k]));
    perfuse::Tensor x = perfuse::Tensor::empty("float32", shape);
    for (int64_t i = 0; i < x.num_elements(); ++i) x.as<float>()[i] = float(i % 7) - 3;
    for (const perfuse::Tensor& result : model({x})) {
      std::printf("%s of %lld elements:", result.dtype.c_str(),
                  static_cast<long long>(result.num_elements()));
      for (int64_t i = 0; i < result.num_elements(); ++i) std::printf(" %.9g", result.as<float>()[i]);
      std::printf("\n");
    }
  } catch (const perfuse::Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}

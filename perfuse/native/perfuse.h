// Runs CPU artefacts of Perfuse in a C++ program: no Python, no PyTorch.
//
//     perfuse::Artefact model("model.perfuse");
//     std::vector<perfuse::Tensor> results = model({x});
//
// The artefact must have been compiled with aot_compile(..., native=True). Its code runs with the
// privileges of this process: load only what you trust.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace perfuse {

// An error in an artefact or in the arguments passed to it.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A strided tensor in memory. `dtype` is PyTorch's name: float32, bfloat16, int64, bool, ...
struct Tensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // in elements
  void* data = nullptr;
  std::shared_ptr<void> owner;  // keeps `data` alive; empty if the caller does

  // A contiguous tensor with its own uninitialised memory.
  static Tensor empty(std::string dtype, std::vector<int64_t> shape);
  // A contiguous tensor over memory that the caller keeps alive.
  static Tensor over(void* data, std::string dtype, std::vector<int64_t> shape);

  int64_t num_elements() const;
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// A loaded artefact. Calls may come from several threads at once.
class Artefact {
 public:
  explicit Artefact(const std::string& folder);  // throws Error
  ~Artefact();
  Artefact(Artefact&&) noexcept;
  Artefact& operator=(Artefact&&) noexcept;

  // The results of the function, in order. `num_threads` 0 takes OpenMP's number.
  std::vector<Tensor> operator()(const std::vector<Tensor>& arguments, int num_threads = 0) const;

  size_t num_arguments() const;

 private:
  struct Program;
  std::unique_ptr<Program> program_;
};

}  // namespace perfuse

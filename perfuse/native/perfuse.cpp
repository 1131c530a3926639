// The program of an artefact is a table of lines (native.txt, written by codegen/host/native.py);
// every file that it names is verified before it is used.
#include "perfuse.h"

#include <dlfcn.h>
#include <omp.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <numeric>
#include <sstream>

namespace perfuse {
namespace {

using Bytes = std::vector<char>;
using Segment = void (*)(void**, const int64_t*);

const std::map<std::string, int64_t> kElementBytes = {
    {"float64", 8}, {"float32", 4}, {"float16", 2}, {"bfloat16", 2}, {"int64", 8}, {"int32", 4},
    {"int16", 2}, {"int8", 1}, {"uint8", 1}, {"uint16", 2}, {"uint32", 4}, {"uint64", 8},
    {"bool", 1}, {"float8_e4m3fn", 1}, {"float8_e5m2", 1}, {"float8_e4m3fnuz", 1},
    {"float8_e5m2fnuz", 1}, {"float8_e8m0fnu", 1}};

int64_t element_bytes(const std::string& dtype) {
  auto found = kElementBytes.find(dtype);
  if (found == kElementBytes.end()) throw Error("unknown dtype " + dtype);
  return found->second;
}

Bytes read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error("cannot read " + path);
  return Bytes(std::istreambuf_iterator<char>(file), {});
}

// -- SHA-256 (FIPS 180-4) ------------------------------------------------------------------------

uint32_t rotated(uint32_t x, int n) { return x >> n | x << (32 - n); }

// The first 32 bits of the fractional parts of the roots of the first primes.
std::vector<uint32_t> root_fractions(int count, double power) {
  std::vector<uint32_t> found;
  for (int n = 2; int(found.size()) < count; ++n) {
    bool is_prime = true;
    for (int d = 2; d * d <= n; ++d) is_prime = is_prime && n % d != 0;
    long double root = power == 2 ? __builtin_sqrtl(n) : __builtin_cbrtl(n);
    if (is_prime) found.push_back(uint32_t((root - __builtin_floorl(root)) * 4294967296.0L));
  }
  return found;
}

void digest_block(const unsigned char* block, std::vector<uint32_t>& state) {
  static const std::vector<uint32_t> k = root_fractions(64, 3);
  uint32_t w[64];
  for (int i = 0; i < 16; ++i)
    w[i] = uint32_t(block[4 * i]) << 24 | block[4 * i + 1] << 16 | block[4 * i + 2] << 8 |
           block[4 * i + 3];
  for (int i = 16; i < 64; ++i) {
    uint32_t a = rotated(w[i - 15], 7) ^ rotated(w[i - 15], 18) ^ w[i - 15] >> 3;
    uint32_t b = rotated(w[i - 2], 17) ^ rotated(w[i - 2], 19) ^ w[i - 2] >> 10;
    w[i] = w[i - 16] + a + w[i - 7] + b;
  }
  auto s = state;
  for (int i = 0; i < 64; ++i) {
    uint32_t e = rotated(s[4], 6) ^ rotated(s[4], 11) ^ rotated(s[4], 25);
    uint32_t t = s[7] + e + ((s[4] & s[5]) ^ (~s[4] & s[6])) + k[i] + w[i];
    uint32_t a = rotated(s[0], 2) ^ rotated(s[0], 13) ^ rotated(s[0], 22);
    uint32_t u = a + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
    s = {t + u, s[0], s[1], s[2], s[3] + t, s[4], s[5], s[6]};
  }
  for (int i = 0; i < 8; ++i) state[i] += s[i];
}

std::string sha256(const Bytes& data) {
  std::vector<uint32_t> state = root_fractions(8, 2);
  std::vector<unsigned char> padded(data.begin(), data.end());
  padded.push_back(0x80);
  while (padded.size() % 64 != 56) padded.push_back(0);
  for (int shift = 56; shift >= 0; shift -= 8)
    padded.push_back(uint64_t(data.size()) * 8 >> shift & 0xff);
  for (size_t at = 0; at < padded.size(); at += 64) digest_block(&padded[at], state);
  std::string text;
  for (uint32_t word : state) {
    char digits[9];
    snprintf(digits, sizeof digits, "%08x", word);
    text += digits;
  }
  return text;
}

// -- matrix products -----------------------------------------------------------------------------

struct Matrix {
  std::string buffer;
  int64_t offset = 0, batch = 0, rows = 0, columns = 0;  // offset and strides, in elements
};

struct Product {
  int64_t batch, m, n, k;
  float alpha, beta;
  Matrix out, a, b, added;
};

// out = alpha * a @ b + beta * added, in float32: four rows of `a` share each row of `b`.
void multiply(const Product& p, float* out, const float* a, const float* b, const float* added) {
#pragma omp parallel for collapse(2) if (p.batch * p.m * p.n * p.k > 32768)
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    for (int64_t block = 0; block < (p.m + 3) / 4; ++block) {
      const int64_t first = 4 * block, num = std::min<int64_t>(4, p.m - first);
      std::vector<float> sums(4 * p.n, 0.0f);
      for (int64_t k = 0; k < p.k; ++k) {
        const float* row = b + batch * p.b.batch + k * p.b.rows;
        for (int64_t i = 0; i < num; ++i) {
          const float x = a[batch * p.a.batch + (first + i) * p.a.rows + k * p.a.columns];
          float* sum = &sums[i * p.n];
          if (p.b.columns == 1)
            for (int64_t j = 0; j < p.n; ++j) sum[j] += x * row[j];
          else
            for (int64_t j = 0; j < p.n; ++j) sum[j] += x * row[j * p.b.columns];
        }
      }
      for (int64_t i = 0; i < num; ++i)
        for (int64_t j = 0; j < p.n; ++j) {
          float value = p.alpha * sums[i * p.n + j];
          if (added)
            value += p.beta * added[batch * p.added.batch + (first + i) * p.added.rows +
                                    j * p.added.columns];
          out[batch * p.out.batch + (first + i) * p.out.rows + j * p.out.columns] = value;
        }
    }
  }
}

std::shared_ptr<void> aligned_memory(int64_t num_bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, size_t(std::max<int64_t>(num_bytes, 1))))
    throw Error("out of memory");
  return {memory, std::free};
}

struct Layout {
  std::string buffer, dtype;
  int64_t offset = 0;
  std::vector<int64_t> shape, strides;

  static Layout read(std::istream& line) {
    Layout made;
    int64_t dims = 0;
    line >> made.buffer >> made.offset >> made.dtype >> dims;
    made.shape.resize(dims);
    made.strides.resize(dims);
    for (int64_t& size : made.shape) line >> size;
    for (int64_t& stride : made.strides) line >> stride;
    return made;
  }
};

bool same_strides(const std::vector<int64_t>& shape, const std::vector<int64_t>& a,
                  const std::vector<int64_t>& b) {
  for (size_t d = 0; d < shape.size(); ++d)
    if (shape[d] > 1 && a[d] != b[d]) return false;
  return true;
}

std::string spelled(const std::string& dtype, const std::vector<int64_t>& shape) {
  std::string text = dtype + "[";
  for (size_t d = 0; d < shape.size(); ++d) text += (d ? ", " : "") + std::to_string(shape[d]);
  return text + "]";
}

// Memory that is in use for one call.
struct Frame {
  std::map<std::string, char*> buffers;
  std::map<std::string, std::shared_ptr<void>> owners;
  std::vector<void*> pointers;
  std::vector<int64_t> sizes;
  std::shared_ptr<void> arena;
  int64_t status = 0;

  char* at(const std::string& name) const {
    auto found = buffers.find(name);
    if (found == buffers.end()) throw Error("the program has no buffer " + name);
    return found->second;
  }
};

using Step = std::function<void(Frame&)>;

}  // namespace

Tensor Tensor::over(void* data, std::string dtype, std::vector<int64_t> shape) {
  element_bytes(dtype);
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<int64_t>(shape[d], 1);
  return {std::move(dtype), std::move(shape), std::move(strides), data, nullptr};
}

Tensor Tensor::empty(std::string dtype, std::vector<int64_t> shape) {
  Tensor made = over(nullptr, std::move(dtype), std::move(shape));
  made.owner = aligned_memory(made.num_elements() * element_bytes(made.dtype));
  made.data = made.owner.get();
  return made;
}

int64_t Tensor::num_elements() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t(1), std::multiplies<int64_t>());
}

struct Artefact::Program {
  std::map<std::string, Bytes> files;
  void* library = nullptr;
  int64_t num_pointers = 1, num_sizes = 1, arena_bytes = 0;
  std::vector<Layout> arguments;  // buffer: the graph's input that it is, or "-"
  std::vector<Step> steps;
  std::vector<Layout> outputs;
  // What a graph is given beside its arguments, shared by all calls.
  std::map<std::string, std::pair<std::string, int64_t>> held;  // buffer -> file, byte offset

  ~Program() {
    if (library) dlclose(library);
  }

  void load(const std::string& folder) {
    std::istringstream table(verified(text_of(read_file(folder + "/native.txt"))));
    std::string line, word;
    std::getline(table, line);
    if (line != "perfuse-native 2") throw Error(folder + " has no program for C++: " + line);
    while (std::getline(table, line)) {
      std::istringstream rest(line);
      rest >> word;
      read_line(folder, word, rest);
      if (rest.fail()) throw Error("damaged line in native.txt: " + line);
    }
  }

  // The last line holds the checksum of all before it; no line is read before it is verified.
  static std::string verified(const std::string& text) {
    size_t end = text.rfind("end ");
    if (end == std::string::npos || (end > 0 && text[end - 1] != '\n')) throw Error("native.txt is truncated");
    if (text.substr(end) != "end " + sha256(Bytes(text.begin(), text.begin() + end)) + "\n")
      throw Error("native.txt is damaged: its checksum does not match");
    return text.substr(0, end);
  }

  static std::string text_of(const Bytes& data) { return {data.begin(), data.end()}; }

  void read_line(const std::string& folder, const std::string& word, std::istream& rest) {
    std::string name, other;
    int64_t number = 0, more = 0;
    if (word == "file") {
      rest >> name >> other;
      if (name.find('/') != std::string::npos) throw Error("not a file of an artefact: " + name);
      Bytes data = read_file(folder + "/" + name);
      if (sha256(data) != other) throw Error(name + " is damaged: its checksum does not match");
      files[name] = std::move(data);
    } else if (word == "isa") {
      rest >> name;
      check_machine(name);
    } else if (word == "library") {
      rest >> name;
      open_library(files.at(name));
    } else if (word == "tables") {
      rest >> num_pointers >> num_sizes >> arena_bytes;
    } else if (word == "argument") {
      arguments.push_back(Layout::read(rest));
    } else if (word == "held") {
      rest >> name >> other >> number;
      held[name] = {other, number};
    } else if (word == "place") {
      rest >> name >> number;
      steps.push_back([=](Frame& f) { f.buffers[name] = static_cast<char*>(f.arena.get()) + number; });
    } else if (word == "same") {
      rest >> name >> other;
      steps.push_back([=](Frame& f) {
        f.buffers[name] = f.at(other);
        f.owners[name] = f.owners[other];
      });
    } else if (word == "make") {
      rest >> name >> number;
      steps.push_back([=](Frame& f) {
        f.owners[name] = aligned_memory(number);
        f.buffers[name] = static_cast<char*>(f.owners[name].get());
      });
    } else if (word == "point") {
      rest >> number >> name;
      steps.push_back([=](Frame& f) { f.pointers.at(number) = f.at(name); });
    } else if (word == "segment") {
      rest >> name >> more;
      add_segment(name, more != 0);
    } else if (word == "product") {
      add_product(rest);
    } else if (word == "output") {
      outputs.push_back(Layout::read(rest));
    } else {
      throw Error("unknown line in native.txt: " + word);
    }
  }

  static void check_machine(const std::string& isa) {
#if defined(__x86_64__)
    bool has = isa == "avx512" ? __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
               : isa == "avx2" ? __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
                               : isa == "scalar";
    if (!has) throw Error("compiled for " + isa + ", which this CPU does not have");
#else
    (void)isa;
#endif
  }

  // From memory: what was verified is what runs.
  void open_library(const Bytes& data) {
    int fd = memfd_create("perfuse", MFD_CLOEXEC);
    if (fd < 0) throw Error("cannot create a file in memory");
    size_t written = 0;
    while (written < data.size()) {
      ssize_t count = write(fd, data.data() + written, data.size() - written);
      if (count <= 0) break;
      written += size_t(count);
    }
    // The loader takes libraries of one path for the same one: each gets a path of its own.
    static std::atomic<int> serial{0};
    std::string path = "/proc/self/fd/";
    for (int left = ++serial; left > 0; left /= 2) path += left % 2 ? "./" : "/";
    path += std::to_string(fd);
    library = written == data.size() ? dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
    std::string reason = library ? "" : written == data.size() ? dlerror() : "out of memory";
    close(fd);
    if (!library) throw Error("cannot load the kernels: " + reason);
  }

  void add_segment(const std::string& name, bool checks) {
    auto run = reinterpret_cast<Segment>(dlsym(library, name.c_str()));
    if (!run) throw Error("the library has no function " + name);
    steps.push_back([=](Frame& f) {
      run(f.pointers.data(), f.sizes.data());
      if (checks && f.status) throw Error("an index is out of bounds");
    });
  }

  static Matrix read_matrix(std::istream& rest) {
    Matrix made;
    rest >> made.buffer >> made.offset >> made.batch >> made.rows >> made.columns;
    return made;
  }

  void add_product(std::istream& rest) {
    Product p;
    rest >> p.batch >> p.m >> p.n >> p.k >> p.alpha >> p.beta;
    p.out = read_matrix(rest);
    p.a = read_matrix(rest);
    p.b = read_matrix(rest);
    p.added = read_matrix(rest);
    steps.push_back([=](Frame& f) {
      auto place = [&](const Matrix& m) { return reinterpret_cast<float*>(f.at(m.buffer)) + m.offset; };
      multiply(p, place(p.out), place(p.a), place(p.b), p.added.buffer == "-" ? nullptr : place(p.added));
    });
  }

  void bind_arguments(Frame& f, const std::vector<Tensor>& given) const {
    if (given.size() != arguments.size())
      throw Error("the artefact takes " + std::to_string(arguments.size()) + " tensors, not " +
                  std::to_string(given.size()));
    for (size_t k = 0; k < given.size(); ++k) {
      const Layout& wanted = arguments[k];
      const Tensor& tensor = given[k];
      bool fits = tensor.dtype == wanted.dtype && tensor.shape == wanted.shape &&
                  tensor.strides.size() == tensor.shape.size();
      if (!fits || !same_strides(tensor.shape, tensor.strides, wanted.strides))
        throw Error("tensor " + std::to_string(k) + " is " + spelled(tensor.dtype, tensor.shape) +
                    ", but the artefact was compiled for " + spelled(wanted.dtype, wanted.shape));
      f.buffers[wanted.buffer] = static_cast<char*>(tensor.data);
    }
    for (const auto& [name, place] : held)
      f.buffers[name] = const_cast<char*>(files.at(place.first).data()) + place.second;
  }

  std::vector<Tensor> run(const std::vector<Tensor>& given, int num_threads) const {
    Frame f;
    f.pointers.assign(num_pointers, nullptr);
    f.sizes.assign(num_sizes, 0);
    f.pointers[0] = &f.status;
    f.sizes[0] = num_threads > 0 ? num_threads : omp_get_max_threads();
    f.arena = aligned_memory(arena_bytes);
    bind_arguments(f, given);
    for (const Step& step : steps) step(f);
    std::vector<Tensor> results;
    for (const Layout& out : outputs) {
      char* data = f.at(out.buffer) + out.offset * element_bytes(out.dtype);
      results.push_back({out.dtype, out.shape, out.strides, data, f.owners[out.buffer]});
    }
    return results;
  }
};

Artefact::Artefact(const std::string& folder) : program_(std::make_unique<Program>()) {
  try {
    program_->load(folder);
  } catch (const std::out_of_range&) {
    throw Error("native.txt refers to a missing file or table");
  }
}
Artefact::~Artefact() = default;
Artefact::Artefact(Artefact&&) noexcept = default;
Artefact& Artefact::operator=(Artefact&&) noexcept = default;

std::vector<Tensor> Artefact::operator()(const std::vector<Tensor>& arguments, int num_threads) const {
  try {
    return program_->run(arguments, num_threads);
  } catch (const std::out_of_range&) {
    throw Error("native.txt refers to a missing file or table");
  }
}

size_t Artefact::num_arguments() const { return program_->arguments.size(); }

}  // namespace perfuse

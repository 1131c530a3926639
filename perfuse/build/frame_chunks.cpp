// An arena allocator for CPython that keeps a few freed blocks of one size instead of unmapping them.
//
// The interpreter lays the frames of Python functions into chunks of 16 KiB, each mapped when the one
// before is full and unmapped when its first frame returns. A call that happens to cross the end of a
// chunk maps and unmaps memory every time it is made.

#include <stddef.h>

namespace {

struct Arena {  // PyObjectArenaAllocator
  void *context;
  void *(*take)(void *, size_t);
  void (*give)(void *, void *, size_t);
};

using Access = void (*)(Arena *);  // PyObject_GetArenaAllocator, PyObject_SetArenaAllocator

constexpr size_t chunk_bytes = 16 << 10;
constexpr int num_slots = 4;

void *slots[num_slots];  // every access is one atomic exchange: no lock is needed, nor the GIL
bool is_keeping = false;
Arena original = {};  // set once: whoever holds a copy of ours still ends up there
size_t num_reused = 0;

void *take(void *, size_t size) {
  if (size == chunk_bytes) {
    for (void *&slot : slots) {
      if (void *kept = __atomic_exchange_n(&slot, nullptr, __ATOMIC_ACQ_REL)) {
        __atomic_add_fetch(&num_reused, 1, __ATOMIC_RELAXED);
        return kept;
      }
    }
  }
  return original.take(original.context, size);
}

void give(void *, void *block, size_t size) {
  if (size == chunk_bytes && __atomic_load_n(&is_keeping, __ATOMIC_ACQUIRE)) {
    for (void *&slot : slots) {
      void *empty = nullptr;
      if (__atomic_compare_exchange_n(&slot, &empty, block, false, __ATOMIC_ACQ_REL,
                                      __ATOMIC_RELAXED)) {
        return;
      }
    }
  }
  original.give(original.context, block, size);
}

bool is_same(const Arena &a, const Arena &b) {
  return a.context == b.context && a.take == b.take && a.give == b.give;
}

constexpr Arena ours = {nullptr, take, give};

}  // namespace

// Both are called with the GIL held. Whether ours is in place afterwards.
extern "C" int keep_chunks(Access get, Access set) {
  Arena current;
  get(&current);
  if (original.take == nullptr) original = current;
  // On top of somebody else's allocator, which may call ours, it would call itself.
  if (!is_same(current, original) && !is_same(current, ours)) return 0;
  Arena mine = ours;
  set(&mine);
  __atomic_store_n(&is_keeping, true, __ATOMIC_RELEASE);
  return 1;
}

// Back to what was there before. Where somebody put theirs on top of ours, ours stays below and only
// passes on. Returns how many blocks were used again so far.
extern "C" size_t release_chunks(Access get, Access set) {
  Arena current;
  get(&current);
  __atomic_store_n(&is_keeping, false, __ATOMIC_RELEASE);
  if (is_same(current, ours)) set(&original);
  for (void *&slot : slots) {
    void *kept = __atomic_exchange_n(&slot, nullptr, __ATOMIC_ACQ_REL);
    if (kept != nullptr) original.give(original.context, kept, chunk_bytes);
  }
  return num_reused;
}

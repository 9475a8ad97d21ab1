// A thread of execution with its own small stack, switched by hand, and the memory for many of them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include <sys/mman.h>

#if defined(__x86_64__) && !defined(TILE_EP_SIM_UCONTEXT)
// Saves what the ABI lets a callee keep on the stack, swaps stacks, restores. `save` receives the old stack pointer.
extern "C" void tile_ep_sim_switch(void **save, void *load);
asm(R"(
.pushsection .text
.type tile_ep_sim_switch,@function
tile_ep_sim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size tile_ep_sim_switch, .-tile_ep_sim_switch
.popsection
)");

struct Context {
  void *stack_pointer = nullptr;

  void prepare(unsigned char *stack, size_t bytes, void (*entry)()) {
    void **top = reinterpret_cast<void **>(stack + (bytes & ~size_t{15}));
    top[-1] = nullptr;  // where `entry` would return to; the stack is aligned as after a call
    top[-2] = reinterpret_cast<void *>(entry);
    for (int i = 3; i <= 8; ++i) top[-i] = nullptr;
    stack_pointer = top - 8;
  }
  static void swap(Context &from, Context &to) { tile_ep_sim_switch(&from.stack_pointer, to.stack_pointer); }
};
#else
#include <ucontext.h>

struct Context {
  ucontext_t saved;

  void prepare(unsigned char *stack, size_t bytes, void (*entry)()) {
    getcontext(&saved);
    saved.uc_stack.ss_sp = stack;
    saved.uc_stack.ss_size = bytes;
    saved.uc_link = nullptr;
    makecontext(&saved, entry, 0);
  }
  static void swap(Context &from, Context &to) { swapcontext(&from.saved, &to.saved); }
};
#endif

// Stacks, kept from one simulation to the next. The lowest page of each is off limits, so that an overflow is a fault.
class Stacks {
 public:
  static constexpr size_t kBytes = 64 << 10, kGuard = 4096, kPerChunk = 256;

  // The tops are spread over a page: equally aligned stacks would share a few sets of the cache.
  static size_t usable(size_t index) { return kBytes - kGuard - index % 16 * 256; }

  // Lowest usable byte of stack `index`, or null without memory.
  unsigned char *at(size_t index) {
    while (index >= chunks_.size() * kPerChunk) {
      void *memory = mmap(nullptr, kBytes * kPerChunk, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) return nullptr;
      unsigned char *chunk = static_cast<unsigned char *>(memory);
      for (size_t i = 0; i < kPerChunk; ++i) mprotect(chunk + i * kBytes, kGuard, PROT_NONE);
      chunks_.push_back(chunk);
    }
    return chunks_[index / kPerChunk] + index % kPerChunk * kBytes + kGuard;
  }

  bool is_guard(uint64_t address) const {
    for (unsigned char *chunk : chunks_) {
      const uint64_t offset = address - reinterpret_cast<uint64_t>(chunk);
      if (offset < kBytes * kPerChunk) return offset % kBytes < kGuard;
    }
    return false;
  }

 private:
  std::vector<unsigned char *> chunks_;
};

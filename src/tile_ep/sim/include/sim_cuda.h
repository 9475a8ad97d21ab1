// What generated CUDA code takes for granted, for a C++ compiler: qualifiers, vector types, 16-bit floats, intrinsics.
// Included before everything else in a simulated kernel. Ordinary C++ otherwise, so accesses to private memory run natively.
#pragma once
#include "sim_abi.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define TL_DEVICE static inline

#define threadIdx (tile_ep_sim_thread->thread)
#define blockIdx (tile_ep_sim_thread->block)
#define blockDim (tile_ep_sim_thread->block_dim)
#define gridDim (tile_ep_sim_thread->grid_dim)
static constexpr int warpSize = 32;

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

// ---------------------------------------------------------------- shared memory

namespace sim {

// Where the declarations `__shared__ T name[n]` and `extern __shared__ T name[]` are rewritten to.
template <typename T, uint32_t N> inline T (&static_shared(uint32_t offset))[N] {
  return *reinterpret_cast<T(*)[N]>(tile_ep_sim_thread->static_shared + offset);
}
template <typename T> inline T *dynamic_shared() { return reinterpret_cast<T *>(tile_ep_sim_thread->dynamic_shared); }

template <typename To, typename From> inline To bit_cast(const From &from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

// A kernel parameter out of the 64-bit word that carries it.
template <typename T> inline T parameter(uint64_t word) {
  T value;
  static_assert(sizeof(T) <= 8, "a kernel parameter is a scalar or a pointer");
  __builtin_memcpy(&value, &word, sizeof(T));
  return value;
}

inline uint16_t half_bits(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value), sign = bits >> 16 & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u)  // subnormal: adding 0.5 rounds to multiples of 2^-24
    return static_cast<uint16_t>(sign | (bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u));
  magnitude += 0xc8000fffu + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | magnitude >> 13);
}
inline float half_value(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, mantissa = bits & 1023u;
  if (exponent == 31) return bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return bit_cast<float>(sign | bit_cast<uint32_t>(magnitude));
  }
  return bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}
inline uint16_t bfloat16_bits(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
inline float bfloat16_value(uint16_t bits) { return bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

}  // namespace sim

// ---------------------------------------------------------------- 16-bit and 8-bit floats

#define SIM_FLOAT16(name, to_bits, to_value)                                                                          \
  struct name {                                                                                                       \
    uint16_t storage;                                                                                                 \
    name() = default;                                                                                                 \
    name(float value) : storage(to_bits(value)) {}                                                                    \
    name(double value) : storage(to_bits(static_cast<float>(value))) {}                                               \
    name(int value) : storage(to_bits(static_cast<float>(value))) {}                                                  \
    explicit operator float() const { return to_value(storage); }                                                     \
    explicit operator double() const { return to_value(storage); }                                                    \
    explicit operator int() const { return static_cast<int>(to_value(storage)); }                                     \
    explicit operator bool() const { return to_value(storage) != 0; }                                                 \
  };                                                                                                                  \
  inline name operator+(name a, name b) { return static_cast<float>(a) + static_cast<float>(b); }                     \
  inline name operator-(name a, name b) { return static_cast<float>(a) - static_cast<float>(b); }                     \
  inline name operator*(name a, name b) { return static_cast<float>(a) * static_cast<float>(b); }                     \
  inline name operator/(name a, name b) { return static_cast<float>(a) / static_cast<float>(b); }                     \
  inline name operator-(name a) { return -static_cast<float>(a); }                                                    \
  inline bool operator<(name a, name b) { return static_cast<float>(a) < static_cast<float>(b); }                     \
  inline bool operator>(name a, name b) { return static_cast<float>(a) > static_cast<float>(b); }                     \
  inline bool operator<=(name a, name b) { return static_cast<float>(a) <= static_cast<float>(b); }                   \
  inline bool operator>=(name a, name b) { return static_cast<float>(a) >= static_cast<float>(b); }                   \
  inline bool operator==(name a, name b) { return static_cast<float>(a) == static_cast<float>(b); }                   \
  inline bool operator!=(name a, name b) { return static_cast<float>(a) != static_cast<float>(b); }                   \
  inline name &operator+=(name &a, name b) { return a = a + b; }                                                      \
  inline name &operator*=(name &a, name b) { return a = a * b; }                                                      \
  struct alignas(4) name##2_pair {                                                                                    \
    name x, y;                                                                                                        \
  };
SIM_FLOAT16(half_t, sim::half_bits, sim::half_value)
SIM_FLOAT16(bfloat16_t, sim::bfloat16_bits, sim::bfloat16_value)
#undef SIM_FLOAT16
typedef half_t half;
typedef half_t __half;
typedef half_t2_pair half2;
typedef half_t2_pair __half2;
typedef bfloat16_t __nv_bfloat16;
typedef bfloat16_t2_pair __nv_bfloat162;

struct fp8_e4_t {
  uint8_t storage;
};
struct fp8_e5_t {
  uint8_t storage;
};

// ---------------------------------------------------------------- vectors

#define SIM_VECTORS(T, name, align2, align4)                                                                          \
  struct name##1 {                                                                                                    \
    T x;                                                                                                              \
  };                                                                                                                  \
  struct alignas(align2) name##2 {                                                                                    \
    T x, y;                                                                                                           \
  };                                                                                                                  \
  struct name##3 {                                                                                                    \
    T x, y, z;                                                                                                        \
  };                                                                                                                  \
  struct alignas(align4) name##4 {                                                                                    \
    T x, y, z, w;                                                                                                     \
  };                                                                                                                  \
  inline name##1 make_##name##1(T x) { return {x}; }                                                                  \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                                          \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                                                  \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SIM_VECTORS(signed char, char, 2, 4)
SIM_VECTORS(unsigned char, uchar, 2, 4)
SIM_VECTORS(short, short, 4, 8)
SIM_VECTORS(unsigned short, ushort, 4, 8)
SIM_VECTORS(int, int, 8, 16)
SIM_VECTORS(unsigned int, uint, 8, 16)
SIM_VECTORS(long, long, 16, 16)
SIM_VECTORS(unsigned long, ulong, 16, 16)
SIM_VECTORS(long long, longlong, 16, 16)
SIM_VECTORS(unsigned long long, ulonglong, 16, 16)
SIM_VECTORS(float, float, 8, 16)
SIM_VECTORS(double, double, 16, 16)
#undef SIM_VECTORS
typedef uint3 dim3;

inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {bfloat16_t(v.x), bfloat16_t(v.y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {static_cast<float>(v.x), static_cast<float>(v.y)}; }
inline half2 __float22half2_rn(float2 v) { return {half_t(v.x), half_t(v.y)}; }
inline float2 __half22float2(half2 v) { return {static_cast<float>(v.x), static_cast<float>(v.y)}; }
inline bfloat16_t __float2bfloat16(float v) { return v; }
inline bfloat16_t __float2bfloat16_rn(float v) { return v; }
inline float __bfloat162float(bfloat16_t v) { return static_cast<float>(v); }
inline half_t __float2half(float v) { return v; }
inline half_t __float2half_rn(float v) { return v; }
inline float __half2float(half_t v) { return static_cast<float>(v); }

// ---------------------------------------------------------------- arithmetic

template <typename A, typename B> inline auto min(A a, B b) -> decltype(a + b) {
  decltype(a + b) x = a, y = b;
  return y < x ? y : x;
}
template <typename A, typename B> inline auto max(A a, B b) -> decltype(a + b) {
  decltype(a + b) x = a, y = b;
  return x < y ? y : x;
}
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline double min(double a, double b) { return __builtin_fmin(a, b); }
inline double max(double a, double b) { return __builtin_fmax(a, b); }
inline int abs(int a) { return a < 0 ? -a : a; }

inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v)); }
inline int __clzll(long long v) { return v == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(v)); }
inline unsigned __brev(unsigned v) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (v >> i & 1u) << (31 - i);
  return reversed;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline int __float_as_int(float v) { return sim::bit_cast<int>(v); }
inline unsigned __float_as_uint(float v) { return sim::bit_cast<unsigned>(v); }
inline float __int_as_float(int v) { return sim::bit_cast<float>(v); }
inline float __uint_as_float(unsigned v) { return sim::bit_cast<float>(v); }
template <typename T> inline T __ldg(const T *pointer) { return *pointer; }

// ---------------------------------------------------------------- the block and the warp

inline void __syncthreads(int line = __builtin_LINE()) { tile_ep_sim_sync_block(line); }
inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) {
  tile_ep_sim_collective(kSyncWarp, mask, 0, 0, line);
}

namespace sim {
template <typename T>
inline T shuffle(SimCollective kind, unsigned mask, T value, int argument, int width, int line) {
  static_assert(sizeof(T) <= 8, "shuffled values have at most 8 bytes");
  uint64_t operand = 0;
  __builtin_memcpy(&operand, &value, sizeof(T));
  const uint64_t extra = static_cast<uint64_t>(static_cast<uint32_t>(width)) << 32 | static_cast<uint32_t>(argument);
  return parameter<T>(tile_ep_sim_collective(kind, mask, operand, extra, line));
}
template <typename T> inline uint64_t operand(T value) {
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  return bits;
}
}  // namespace sim

template <typename T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, int line = __builtin_LINE()) {
  return sim::shuffle(kShfl, mask, value, source, width, line);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  return sim::shuffle(kShflUp, mask, value, static_cast<int>(delta), width, line);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  return sim::shuffle(kShflDown, mask, value, static_cast<int>(delta), width, line);
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, int line = __builtin_LINE()) {
  return sim::shuffle(kShflXor, mask, value, lanes, width, line);
}
template <typename T> inline unsigned __match_any_sync(unsigned mask, T value, int line = __builtin_LINE()) {
  return static_cast<unsigned>(tile_ep_sim_collective(kMatchAny, mask, sim::operand(value), 0, line));
}
template <typename T> inline unsigned __match_all_sync(unsigned mask, T value, int *all, int line = __builtin_LINE()) {
  const unsigned same = static_cast<unsigned>(tile_ep_sim_collective(kMatchAll, mask, sim::operand(value), 0, line));
  *all = same != 0;
  return same;
}
inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return static_cast<unsigned>(tile_ep_sim_collective(kBallot, mask, predicate != 0, 0, line));
}
inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return __ballot_sync(mask, predicate, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return __ballot_sync(mask, predicate == 0, line) == 0;
}
// Which lanes run together is not specified: here, each alone.
inline unsigned __activemask() { return 1u << (threadIdx.x & 31); }
inline void __threadfence() { tile_ep_sim_fence(); }
inline void __threadfence_system() { tile_ep_sim_fence(); }
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { tile_ep_sim_pause(); }
inline void __trap() { tile_ep_sim_trap("__trap"); }

namespace tl {
inline int get_lane_idx(int warp_size = 32) { return static_cast<int>(threadIdx.x) % warp_size; }
inline int get_warp_idx(int warp_size = 32) { return static_cast<int>(threadIdx.x) / warp_size; }
inline int get_warp_idx_sync(int warp_size = 32) { return get_warp_idx(warp_size); }
template <typename T, typename Op> inline T warp_reduce(T value, Op op) {
  for (int lanes = 16; lanes > 0; lanes /= 2) value = op(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  return value;
}
template <typename T> inline T warp_reduce_sum(T value) { return warp_reduce(value, [](T a, T b) { return T(a + b); }); }
template <typename T> inline T warp_reduce_max(T value) { return warp_reduce(value, [](T a, T b) { return T(max(a, b)); }); }
template <typename T> inline T warp_reduce_min(T value) { return warp_reduce(value, [](T a, T b) { return T(min(a, b)); }); }
}  // namespace tl

// ---------------------------------------------------------------- atomics on shared memory
// A thread is only interrupted in the functions above and in the device layer, so these are atomic as they stand.

template <typename T, typename V> inline T atomicAdd(T *address, V value) {
  const T old = *address;
  *address = old + static_cast<T>(value);
  return old;
}
template <typename T, typename V> inline T atomicMax(T *address, V value) {
  const T old = *address;
  if (old < static_cast<T>(value)) *address = static_cast<T>(value);
  return old;
}
template <typename T, typename V> inline T atomicMin(T *address, V value) {
  const T old = *address;
  if (static_cast<T>(value) < old) *address = static_cast<T>(value);
  return old;
}
template <typename T, typename V> inline T atomicOr(T *address, V value) {
  const T old = *address;
  *address = old | static_cast<T>(value);
  return old;
}
template <typename T, typename V> inline T atomicAnd(T *address, V value) {
  const T old = *address;
  *address = old & static_cast<T>(value);
  return old;
}
template <typename T, typename V> inline T atomicExch(T *address, V value) {
  const T old = *address;
  *address = static_cast<T>(value);
  return old;
}
template <typename T, typename C, typename V> inline T atomicCAS(T *address, C compare, V value) {
  const T old = *address;
  if (old == static_cast<T>(compare)) *address = static_cast<T>(value);
  return old;
}
template <typename T, typename V> inline void AtomicAdd(T *address, V value, int = 0) { atomicAdd(address, value); }
template <typename T, typename V> inline T AtomicAddRet(T *address, V value, int = 0) { return atomicAdd(address, value); }
template <typename T, typename V> inline void AtomicMax(T *address, V value, int = 0) { atomicMax(address, value); }
template <typename T, typename V> inline T AtomicMaxRet(T *address, V value, int = 0) { return atomicMax(address, value); }
template <typename T, typename V> inline void AtomicMin(T *address, V value, int = 0) { atomicMin(address, value); }
template <typename T, typename V> inline T AtomicMinRet(T *address, V value, int = 0) { return atomicMin(address, value); }
template <typename T> inline T AtomicLoad(T *address, int = 0) { return *address; }
template <typename T, typename V> inline void AtomicStore(T *address, V value, int = 0) { *address = static_cast<T>(value); }

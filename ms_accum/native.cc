// The end of a window on CPU: what MindSpore's kernels do in four passes over the gradients takes two here.
//
// Functions have the interface of `mindspore.ops.Custom`: pointers to the inputs, then to the outputs, with their numbers
// of axes and their shapes; 0 is success. All arrays are float32. Arithmetic is that of IEEE 754, operation by operation
// (no fused multiply-add, no reordering), and sums are made in blocks of a fixed size, so that the same bytes come out on
// every CPU and with any number of threads: ranks on different machines must not drift apart.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif

namespace {

constexpr int64_t kBlock = 1 << 16;
// A thread takes 16 to 34 us from start to end, and a core 32 us for the norm of so many blocks (measured on AMD EPYC).
constexpr size_t kBlocksPerThread = 8;
constexpr int kLanes = 16;
constexpr uint32_t kExponent = 0x7F800000;  // all these bits are set in what is not finite

int64_t SizeOf(int ndim, const int64_t *shape) {
  int64_t size = 1;
  for (int axis = 0; axis < ndim; ++axis) size *= shape[axis];
  return size;
}

// A part of one of the arrays.
struct Block {
  int array;
  int64_t begin, end;
};

std::vector<Block> BlocksOf(int count, const int *ndims, int64_t **shapes) {
  std::vector<Block> blocks;
  for (int array = 0; array < count; ++array) {
    const int64_t size = SizeOf(ndims[array], shapes[array]);
    for (int64_t begin = 0; begin < size; begin += kBlock) {
      blocks.push_back({array, begin, std::min(size, begin + kBlock)});
    }
  }
  return blocks;
}

size_t Cores() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1U, std::thread::hardware_concurrency());
}

// Calls work(i) for each i < count, on several threads if that is faster. Which thread runs which i changes no byte.
template <class Work>
void InThreads(size_t count, const Work &work) {
  const size_t most = count < 2 * kBlocksPerThread ? 1 : std::min(Cores(), count / kBlocksPerThread);
  const auto share = [&](size_t thread) {
    for (size_t i = count * thread / most; i < count * (thread + 1) / most; ++i) work(i);
  };
  std::vector<std::thread> threads;
  size_t started = 1;
  try {
    for (; started < most; ++started) threads.emplace_back(share, started);
  } catch (const std::exception &) {  // a limit on threads: this one does the rest
  }
  share(0);
  for (size_t thread = started; thread < most; ++thread) share(thread);
  for (auto &thread : threads) thread.join();
}

// MindSpore says the types of inputs; one of another type would be misread, and an array be written beyond its end.
bool Are(const char *type, int first, int count, const char **dtypes) {
  for (int i = first; dtypes != nullptr && i < first + count; ++i) {
    if (std::strcmp(dtypes[i], type) != 0) return false;
  }
  return true;
}

bool AreFloats(int first, int count, const char **dtypes) { return Are("float32", first, count, dtypes); }

double SumOfSquares(int count, void **arrays, const int *ndims, int64_t **shapes) {
  const std::vector<Block> blocks = BlocksOf(count, ndims, shapes);
  std::vector<double> sums(blocks.size());
  InThreads(blocks.size(), [&](size_t number) {
    const Block &block = blocks[number];
    const float *array = static_cast<const float *>(arrays[block.array]);
    double lanes[kLanes] = {0};
    int64_t i = block.begin;
    for (; i + kLanes <= block.end; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const double value = array[i + lane];
        lanes[lane] += value * value;
      }
    }
    for (int lane = 0; i < block.end; ++i, ++lane) {
      const double value = array[i];
      lanes[lane] += value * value;
    }
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    sums[number] = lanes[0];
  });
  double total = 0;
  for (const double sum : sums) total += sum;
  // As in MindSpore's kernels, which sum in float32.
  return total > FLT_MAX ? std::numeric_limits<double>::infinity() : total;
}

// An update of all parameters by one rule, with what the rules have in common. The inputs are, in this order:
//   whether the gradient is finite, the factor of the gradients, the factor of the old averages,
//   the rates and the decays, one for all arrays or one for each, and what unscales a gradient after its decay;
//   the layout: the number of arrays, whether the gradients are emptied, whether there are averages, and how many counters;
//   the numbers of the rule; the counters, int32, which an update advances by 1;
//   the arrays: all gradients, all parameters, each kind of state, the averages.
class Update {
 public:
  Update(int nparam, void **params, int *ndims, int64_t **shapes, const char **dtypes, int numbers, int states)
      : inputs_(params, params + nparam), params_(inputs_.data()), ndims_(ndims), shapes_(shapes), states_(states) {
    const int32_t *layout = static_cast<const int32_t *>(params[kLayout]);
    arrays_ = layout[0];
    empties_ = layout[1] != 0;
    averages_ = layout[2] != 0;
    first_ = kLayout + 1 + numbers + layout[3];
    const int count = arrays_ * (2 + states + (averages_ ? 1 : 0));
    valid_ = nparam == first_ + count + 1 && Are("bool", kFinite, 1, dtypes) && Are("int32", kLayout, 1, dtypes) &&
             AreFloats(kFactor, kLayout - kFactor, dtypes) && AreFloats(kLayout + 1, numbers, dtypes) &&
             Are("int32", first_ - layout[3], layout[3], dtypes) && AreFloats(first_, count, dtypes);
    if (valid_ && !empties_) CopyShared(count);
    finite = valid_ && *static_cast<const bool *>(params[kFinite]);
    for (int counter = first_ - layout[3]; finite && counter < first_; ++counter) {
      *static_cast<int32_t *>(params[counter]) += 1;
    }
    *static_cast<bool *>(params[nparam - 1]) = finite;
  }

  bool finite;  // false also for inputs that are refused

  // The number of the rule with this index.
  float *Number(int index) const { return static_cast<float *>(params_[kLayout + 1 + index]); }

  template <class Rule>
  int Run(const Rule &rule) const {
    if (!valid_) return 1;
    const std::vector<Block> blocks = BlocksOf(arrays_, ndims_ + first_, shapes_ + first_);
    InThreads(blocks.size(), [&](size_t number) {
      const Block &block = blocks[number];
      if (!finite) {
        if (empties_) std::memset(Array(0, block.array) + block.begin, 0, sizeof(float) * (block.end - block.begin));
      } else if (averages_) {
        empties_ ? UpdateBlock<Rule, true, true>(rule, block) : UpdateBlock<Rule, true, false>(rule, block);
      } else {
        empties_ ? UpdateBlock<Rule, false, true>(rule, block) : UpdateBlock<Rule, false, false>(rule, block);
      }
    });
    return 0;
  }

 private:
  // Without accumulators MindSpore may hand in a parameter as a gradient: that of a in a * b is b. Such a gradient is
  // copied before anything is written.
  void CopyShared(int count) {
    std::vector<std::pair<const float *, const float *>> written;
    for (int i = arrays_; i < count; ++i) {
      const float *array = static_cast<const float *>(params_[first_ + i]);
      written.push_back({array, array + SizeOf(ndims_[first_ + i], shapes_[first_ + i])});
    }
    std::sort(written.begin(), written.end());  // they do not overlap
    for (int i = 0; i < arrays_; ++i) {
      const float *begin = static_cast<const float *>(params_[first_ + i]);
      const float *end = begin + SizeOf(ndims_[first_ + i], shapes_[first_ + i]);
      auto next = std::lower_bound(written.begin(), written.end(), std::make_pair(begin, begin));
      if (next != written.begin()) --next;
      for (; next != written.end() && next->first < end; ++next) {
        if (next->second > begin) {
          copies_.emplace_back(begin, end);
          params_[first_ + i] = copies_.back().data();
          break;
        }
      }
    }
  }

  enum Input { kFinite, kFactor, kKept, kRates, kDecays, kUnscale, kLayout };

  float OfArray(Input input, int array) const {
    const int64_t size = SizeOf(ndims_[input], shapes_[input]);
    return static_cast<const float *>(params_[input])[size == 1 ? 0 : array];
  }

  float *Array(int kind, int array) const { return static_cast<float *>(params_[first_ + kind * arrays_ + array]); }

  template <class Rule, bool kAverages, bool kEmpties>
  void UpdateBlock(const Rule &rule, const Block &block) const {
    constexpr int kStates = Rule::kStates;
    float *__restrict gradients = Array(0, block.array);
    float *__restrict parameters = Array(1, block.array);
    float *__restrict first = kStates > 0 ? Array(2, block.array) : nullptr;
    float *__restrict second = kStates > 1 ? Array(3, block.array) : nullptr;
    float *__restrict averages = kAverages ? Array(2 + states_, block.array) : nullptr;
    const float factor = OfArray(kFactor, 0), unscale = OfArray(kUnscale, 0);
    const float kept = OfArray(kKept, 0), added = 1.0F - kept;
    const float rate = OfArray(kRates, block.array), decay = OfArray(kDecays, block.array);
    for (int64_t i = block.begin; i < block.end; ++i) {
      float gradient = gradients[i] * factor, parameter = parameters[i];
      if (Rule::kDecaysGradient) {
        if (decay != 0) gradient = parameter * decay + gradient;
        gradient *= unscale;
      }
      float one = kStates > 0 ? first[i] : 0, two = kStates > 1 ? second[i] : 0;
      rule(gradient, rate, decay, &parameter, &one, &two);
      parameters[i] = parameter;
      if (kStates > 0) first[i] = one;
      if (kStates > 1) second[i] = two;
      if (kAverages) averages[i] = averages[i] * kept + parameter * added;
      if (kEmpties) gradients[i] = 0;
    }
  }

  std::vector<void *> inputs_;
  void **params_;
  int *ndims_;
  int64_t **shapes_;
  std::deque<std::vector<float>> copies_;
  int states_, arrays_, first_;
  bool valid_, empties_, averages_;
};

struct MomentumRule {
  static constexpr int kStates = 1;
  static constexpr bool kDecaysGradient = true;
  float momentum;
  void operator()(float gradient, float rate, float, float *parameter, float *moment, float *) const {
    *moment = *moment * momentum + gradient;
    *parameter -= *moment * rate;
  }
};

struct SgdRule {
  static constexpr int kStates = 2;  // the second is positive until the first update
  static constexpr bool kDecaysGradient = true;
  float momentum, dampening;
  bool nesterov;
  void operator()(float gradient, float rate, float, float *parameter, float *moment, float *is_first) const {
    *moment = *is_first > 0 ? gradient : *moment * momentum + (1.0F - dampening) * gradient;
    *is_first = 0;
    *parameter -= rate * (nesterov ? gradient + *moment * momentum : *moment);
  }
};

struct PlainSgdRule {
  static constexpr int kStates = 0;
  static constexpr bool kDecaysGradient = true;
  void operator()(float gradient, float rate, float, float *parameter, float *, float *) const {
    *parameter -= rate * gradient;
  }
};

struct AdamRule {
  static constexpr int kStates = 2;
  static constexpr bool kDecaysGradient = true;
  float beta1, beta2, epsilon, correction;
  bool nesterov;
  void operator()(float gradient, float rate, float, float *parameter, float *m, float *v) const {
    *m += (gradient - *m) * (1.0F - beta1);
    *v += (gradient * gradient - *v) * (1.0F - beta2);
    const float step = nesterov ? *m * beta1 + (1.0F - beta1) * gradient : *m;
    *parameter -= rate * correction * step / (std::sqrt(*v) + epsilon);
  }
};

struct AdamWeightDecayRule {
  static constexpr int kStates = 2;
  static constexpr bool kDecaysGradient = false;
  float beta1, beta2, epsilon;
  void operator()(float gradient, float rate, float decay, float *parameter, float *m, float *v) const {
    *m += (gradient - *m) * (1.0F - beta1);
    *v += (gradient * gradient - *v) * (1.0F - beta2);
    const float step = *m / (std::sqrt(*v) + epsilon) + decay * *parameter;
    *parameter -= rate * step;
  }
};

// That of `mindspore.experimental.optim`, whose rate and decay come with their corrections.
struct AdamWRule {
  static constexpr int kStates = 2;
  static constexpr bool kDecaysGradient = false;
  float beta1, beta2, epsilon, root;
  void operator()(float gradient, float rate, float shrink, float *parameter, float *m, float *v) const {
    *m = *m * beta1 + gradient * (1.0F - beta1);
    *v = *v * beta2 + (1.0F - beta2) * (gradient * gradient);
    *parameter = *parameter * shrink - *m / (std::sqrt(*v) / root + epsilon) * rate;
  }
};

}  // namespace

#define OPERATOR(name) \
  extern "C" int name(int nparam, void **params, int *ndims, int64_t **shapes, const char **dtypes, void *, void *)

// The norm of all elements of all inputs; not finite if one is not finite, or if their squares overflow float32.
OPERATOR(norm) {
  if (!AreFloats(0, nparam - 1, dtypes)) return 1;
  const double sum = SumOfSquares(nparam - 1, params, ndims, shapes);
  *static_cast<float *>(params[nparam - 1]) = static_cast<float>(std::sqrt(sum));
  return 0;
}

OPERATOR(sum_of_squares) {
  if (!AreFloats(0, nparam - 1, dtypes)) return 1;
  *static_cast<float *>(params[nparam - 1]) = static_cast<float>(SumOfSquares(nparam - 1, params, ndims, shapes));
  return 0;
}

// Writes zeros into all inputs.
OPERATOR(empty) {
  if (!AreFloats(0, nparam - 1, dtypes)) return 1;
  const std::vector<Block> blocks = BlocksOf(nparam - 1, ndims, shapes);
  InThreads(blocks.size(), [&](size_t number) {
    const Block &block = blocks[number];
    float *array = static_cast<float *>(params[block.array]);
    std::memset(array + block.begin, 0, sizeof(float) * (block.end - block.begin));
  });
  *static_cast<bool *>(params[nparam - 1]) = true;
  return 0;
}

// Adds factor * gradient to each sum. Inputs: the factor, whether a factor of 0 adds nothing, all sums, all gradients.
OPERATOR(add) {
  if (!AreFloats(0, 1, dtypes) || !Are("bool", 1, 1, dtypes) || !AreFloats(2, nparam - 3, dtypes)) return 1;
  const float factor = *static_cast<const float *>(params[0]);
  const bool skips = *static_cast<const bool *>(params[1]) && factor == 0;
  const int count = (nparam - 3) / 2;
  const std::vector<Block> blocks = BlocksOf(skips ? 0 : count, ndims + 2, shapes + 2);
  InThreads(blocks.size(), [&](size_t number) {
    const Block &block = blocks[number];
    float *__restrict sums = static_cast<float *>(params[2 + block.array]);
    const float *__restrict gradients = static_cast<const float *>(params[2 + count + block.array]);
    for (int64_t i = block.begin; i < block.end; ++i) sums[i] += gradients[i] * factor;
  });
  *static_cast<bool *>(params[nparam - 1]) = !skips;
  return 0;
}

OPERATOR(all_finite) {
  if (!AreFloats(0, nparam - 1, dtypes)) return 1;
  const std::vector<Block> blocks = BlocksOf(nparam - 1, ndims, shapes);
  std::vector<char> bad(blocks.size(), 0);
  InThreads(blocks.size(), [&](size_t number) {
    const Block &block = blocks[number];
    const float *array = static_cast<const float *>(params[block.array]);
    uint32_t found = 0;
    for (int64_t i = block.begin; i < block.end; ++i) {
      uint32_t bits;
      std::memcpy(&bits, array + i, sizeof(bits));
      found |= (bits & kExponent) == kExponent ? 1U : 0U;
    }
    bad[number] = found != 0;
  });
  *static_cast<bool *>(params[nparam - 1]) = std::none_of(bad.begin(), bad.end(), [](char each) { return each != 0; });
  return 0;
}

OPERATOR(momentum) {
  const Update update(nparam, params, ndims, shapes, dtypes, 1, 1);
  return update.Run(MomentumRule{*update.Number(0)});
}

OPERATOR(sgd) {
  const Update update(nparam, params, ndims, shapes, dtypes, 3, 2);
  if (!(*update.Number(0) > 0)) return update.Run(PlainSgdRule{});
  return update.Run(SgdRule{*update.Number(0), *update.Number(1), *update.Number(2) != 0});
}

OPERATOR(adam) {
  const Update update(nparam, params, ndims, shapes, dtypes, 6, 2);
  const float beta1 = *update.Number(2), beta2 = *update.Number(3);
  const float power1 = *update.Number(0) * beta1, power2 = *update.Number(1) * beta2;
  if (update.finite) {
    *update.Number(0) = power1;
    *update.Number(1) = power2;
  }
  const float correction = std::sqrt(1.0F - power2) / (1.0F - power1);
  return update.Run(AdamRule{beta1, beta2, *update.Number(4), correction, *update.Number(5) != 0});
}

OPERATOR(adam_weight_decay) {
  const Update update(nparam, params, ndims, shapes, dtypes, 3, 2);
  return update.Run(AdamWeightDecayRule{*update.Number(0), *update.Number(1), *update.Number(2)});
}

OPERATOR(adamw) {
  const Update update(nparam, params, ndims, shapes, dtypes, 4, 2);
  return update.Run(AdamWRule{*update.Number(0), *update.Number(1), *update.Number(2), *update.Number(3)});
}

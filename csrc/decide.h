// How adaptive clips decide about a step and what state they keep, for CPU and device alike. The methods are
// those of gradstat/adaptive, which cites their sources and also implements them in plain torch. A `Team` is
// the group of threads that decide together (ops.cpp, decide_cuda.cuh):
//   rank, size               of the calling thread in the team
//   barrier()                makes all writes before it visible
//   all_reduce(value, how)   reduces the values of all threads; every thread gets the result
// and neighbours(team, numbers, count, k): the k-th smallest of numbers(0 .. count - 1), counted from 0, and
// the next, or itself if last.
#pragma once

#include "entry.h"

#if defined(__CUDACC__)
#define GRADSTAT_TEAMWORK __device__ __forceinline__
#else
#define GRADSTAT_TEAMWORK inline
#endif

namespace gradstat {

// Limits within which no size of a state overflows, and every count is exact.
constexpr int64_t kMostWindow = int64_t{1} << 48;
constexpr double kMostRecorded = 0x1p53;

struct Neighbours {
  double lower, upper;
};

// The quantile of numbers(0 .. count - 1), interpolated linearly as by numpy.percentile. count >= 1, no NaN.
template <class Team, class Numbers>
GRADSTAT_TEAMWORK double quantile(const Team& team, const Numbers& numbers, int64_t count, double share) {
  const double place = share * static_cast<double>(count - 1);
  const auto below = static_cast<int64_t>(place);
  const Neighbours at = neighbours(team, numbers, count, below);
  const double part = place - static_cast<double>(below), gap = at.upper - at.lower;
  return part < 0.5 ? at.lower + part * gap : at.upper - (1.0 - part) * gap;
}

// The number of recorded values, read from a state that other code may have changed; no valid count gives 0.
// Indices of rings are computed from it, and the state on a GPU cannot be checked without waiting for it.
GRADSTAT_HD double count_of(double recorded) {
  return recorded >= 0 && recorded <= kMostRecorded ? recorded : 0.0;
}

// In the order of the constants in gradstat/adaptive/_base.py.
enum class ClipMethod : int64_t { kFixed, kPercentile, kZScore, kTensors, kUnits };
constexpr int64_t kClipMethods = 5;
// Whether a method gives each row its own multiplier, instead of one to all.
GRADSTAT_HD bool decides_each(ClipMethod method) {
  return method == ClipMethod::kTensors || method == ClipMethod::kUnits;
}
// Whether a method leaves norms of zero out, since a limit made of them would hold gradients at zero for ever.
GRADSTAT_HD bool leaves_zeros_out(ClipMethod method) {
  return method == ClipMethod::kPercentile || method == ClipMethod::kZScore;
}
constexpr int kClipOptions = 5;
constexpr int64_t kZScoreNumbers = 3;
constexpr double kMostOutliers = 25;  // in a row, for kZScore; those that follow are a new level

// The state of a clip begins with these, as in gradstat/adaptive/_history.py. They are followed by a ring
// buffer of the last norms and by the method's own numbers.
struct ClipTotals {
  double recorded, nonfinite, decided, clipped, multiplier_sum, smallest;
};
constexpr int64_t kClipTotals = sizeof(ClipTotals) / sizeof(double);

struct ClipRequest {
  ClipMethod method;
  double options[kClipOptions];  // in the order of the method's class
  double* state;
  int64_t window;       // capacity of the ring of norms
  const double* norm;   // of all gradients; null: computed from `rows`
  const Row* rows;      // of the tensors, or of the units, that get a multiplier each
  int64_t count;        // of rows
  const Row* weights;   // of the units' weights; for kUnits only
  const float* factor;  // an additional multiplier for all gradients; null: 1
  const float* skip;    // nonzero if the step is skipped; null: 0
  double* out;          // the multiplier, or one for each row, times the factor; then the norm times the factor
};

namespace clips {

// The multiplier that reduces a norm to a limit. A NaN limit or norm gives 1.
GRADSTAT_HD double limiting_multiplier(double norm, double limit) { return norm > limit ? limit / norm : 1.0; }
GRADSTAT_HD bool is_finite(double x) { return x - x == 0; }

// The decisions of one thread.
struct Tally {
  double decided = 0, clipped = 0, multiplier_sum = 0, smallest = 1;

  GRADSTAT_HD double count(double multiplier) {
    decided += 1;
    if (multiplier < 1) {
      clipped += 1;
      multiplier_sum += multiplier;
      smallest = merge::min(smallest, multiplier);
    }
    return multiplier;
  }
};

// `statistics`: mean, standard deviation, and the number of norms in the warm-up and of outliers in a row
// since.
GRADSTAT_HD double by_z_score(const double* options, double* statistics, double norm) {
  const double z_threshold = options[0], alpha = options[1], warmup = options[2], to = options[3];
  double mean = statistics[0], deviation = statistics[1], count = statistics[2];
  const double excess = norm - mean, ordinary = z_threshold * deviation;
  bool is_outlier = count >= warmup && excess > ordinary;
  if (is_outlier && count >= warmup + kMostOutliers) {
    mean = norm;
    deviation = count = 0;
    is_outlier = false;
  }
  const bool warming_up = count < warmup;
  double after = norm;
  if (is_outlier) {
    after = mean + (to == 0 ? ordinary * (ordinary / excess) : to == 1 ? ordinary : 0.0);
  }
  // One update serves both phases, as in gradstat/adaptive/norm_clips.py.
  const double weight = warming_up ? 1 / (count + 1) : 1 - alpha;
  const double step = after - mean;
  const double distance = fabs(step) * (warming_up ? sqrt(1 - weight) : 1 - weight);
  statistics[0] = mean + weight * step;
  statistics[1] = hypot(sqrt(1 - weight) * deviation, sqrt(weight) * distance);
  statistics[2] = warming_up || is_outlier ? count + 1 : warmup;
  return limiting_multiplier(norm, merge::min(after, options[4]));
}

// `mean`: the mean norm of this tensor after clipping, infinite before the first.
GRADSTAT_HD double by_own_mean(const double* options, double& mean, double norm, double total,
                               bool warming_up) {
  const double relative = options[0], beta = options[1], absolute = options[3];
  const double multiplier =
      warming_up ? limiting_multiplier(total, absolute) : limiting_multiplier(norm, relative * mean);
  const double after = multiplier * norm;
  mean = warming_up ? merge::min(mean, after) : is_inf(mean) ? after : beta * mean + (1 - beta) * after;
  return multiplier;
}

}  // namespace clips

template <class Team>
GRADSTAT_TEAMWORK void decide_clip(const ClipRequest& request, const Team& team) {
  const double* const options = request.options;
  auto& totals = *reinterpret_cast<ClipTotals*>(request.state);
  double* const norms = request.state + kClipTotals;
  double* const of_method = norms + request.window;
  const double factor = request.factor != nullptr ? static_cast<double>(*request.factor) : 1.0;
  double norm = 0;
  if (request.norm != nullptr) {
    norm = *request.norm;
  } else {
    Row all = identity_row();
    for (int64_t i = team.rank(); i < request.count; i += team.size()) merge_into(all, request.rows[i]);
#define GRADSTAT_FIELD(name, how) \
  all.name = team.all_reduce(all.name, [](double a, double b) { return merge::how(a, b); });
#include "stat_fields.def"
    norm = factor * reported_norm(all, false);
  }

  const bool is_step = request.skip == nullptr || *request.skip == 0;
  const bool is_kept = is_step && clips::is_finite(norm) && (norm > 0 || !leaves_zeros_out(request.method));
  const double before = count_of(totals.recorded), recorded = before + (is_kept ? 1 : 0);
  const bool leads = team.rank() == 0;
  team.barrier();
  if (leads) {
    if (is_kept) norms[static_cast<int64_t>(before) % request.window] = norm;
    totals.recorded = recorded;
    totals.nonfinite += clips::is_finite(norm) ? 0 : 1;
  }
  team.barrier();

  clips::Tally tally;
  if (decides_each(request.method)) {
    const bool warming_up = request.method == ClipMethod::kTensors && before < options[2];
    for (int64_t i = team.rank(); i < request.count; i += team.size()) {
      const double each = factor * reported_norm(request.rows[i], false);
      double multiplier = 1;
      if (!is_step || !clips::is_finite(each)) {
      } else if (request.method == ClipMethod::kUnits) {
        const double weight = reported_norm(request.weights[i], false);
        multiplier = tally.count(clips::limiting_multiplier(each, options[0] * merge::max(weight, options[1])));
      } else if (each > 0 && (is_kept || !warming_up)) {
        // During warmup the total norm clips all tensors, so their norms are used only if it is finite.
        multiplier = tally.count(clips::by_own_mean(options, of_method[i], each, norm, warming_up));
      }
      request.out[i] = multiplier * factor;
    }
  } else {
    double limit = 0;
    if (request.method == ClipMethod::kPercentile && is_kept) {
      const auto window = static_cast<double>(request.window);
      const auto count = static_cast<int64_t>(merge::min(recorded, window));
      limit = quantile(team, [&](int64_t i) { return norms[i]; }, count, options[0] / 100);
    }
    if (leads) {
      double multiplier = 1;
      if (is_kept) {
        multiplier =
            tally.count(request.method == ClipMethod::kFixed    ? clip_multiplier(norm, options[0])
                        : request.method == ClipMethod::kZScore ? clips::by_z_score(options, of_method, norm)
                                                                : clips::limiting_multiplier(norm, limit));
      }
      request.out[0] = multiplier * factor;
    }
  }

  const auto sum = [](double a, double b) { return merge::sum(a, b); };
  tally.decided = team.all_reduce(tally.decided, sum);
  tally.clipped = team.all_reduce(tally.clipped, sum);
  tally.multiplier_sum = team.all_reduce(tally.multiplier_sum, sum);
  tally.smallest = team.all_reduce(tally.smallest, [](double a, double b) { return merge::min(a, b); });
  if (!leads) return;
  totals.decided += tally.decided;
  totals.clipped += tally.clipped;
  totals.multiplier_sum += tally.multiplier_sum;
  totals.smallest = merge::min(totals.smallest, tally.smallest);
  request.out[decides_each(request.method) ? request.count : 1] = norm;
}

// A guard of optimizer steps (gradstat/guard.py) judges two series: losses and norms.
constexpr int kGuarded = 2;

struct GuardOptions {
  double by_sigmas;  // 1 to judge by mean and sigma, 0 by the median
  double threshold;
  double warmup;
  double most_in_a_row;     // refusals
  double scale;             // the factor for a refused step; 0 to skip it
  double limits[kGuarded];  // the upper limit of each series
};
constexpr int kGuardOptions = sizeof(GuardOptions) / sizeof(double);

// The state of a guard begins with these, followed by a ring buffer of the last values of each series.
struct GuardTotals {
  double steps, refused, by[kGuarded], nonfinite;  // counts; one step may be refused by both series
  double in_a_row;            // refused since the last step that was not; nonfinite steps do not count
  double reason;              // of the last step, as in the verdict
  double recorded[kGuarded];  // number of values recorded
};
constexpr int64_t kGuardTotals = sizeof(GuardTotals) / sizeof(double);
// A verdict (entry.h) followed by the reason: 0 if taken, 1 if not finite, else the sum of 2 and 4 for the
// series that refused the step.
constexpr int kGuardVerdict = 4;

struct GuardRequest {
  GuardOptions options;
  double* state;
  int64_t window;
  Scaling* scaling;      // of the step (entry.h)
  const float* verdict;  // of the measured step (entry.h)
  const void* loss;      // may be null
  DType loss_dtype;
  float* out;         // kGuardVerdict
  int64_t* counters;  // kCounters (entry.h), or null
};

namespace guards {

enum Judgement : int { kOrdinary, kOutlier, kAboveLimit, kMissing, kNonfinite };

GRADSTAT_HD double value_of(const GuardRequest& request, int series) {
  if (series == 1) return request.scaling->norm;
  return value_at(reinterpret_cast<uint64_t>(request.loss), request.loss_dtype, 0);
}

template <class Team>
GRADSTAT_TEAMWORK int judge(const GuardRequest& request, int series, const Team& team) {
  if (series == 0 && request.loss == nullptr) return kMissing;
  const double value = value_of(request, series);
  if (!clips::is_finite(value)) return kNonfinite;
  const GuardOptions& options = request.options;
  if (value > options.limits[series]) return kAboveLimit;
  const auto& totals = *reinterpret_cast<const GuardTotals*>(request.state);
  const double* const ring = request.state + kGuardTotals + series * request.window;
  const double recorded = count_of(totals.recorded[series]);
  // The newest values are left out, so that a growing series is compared with values from before it grew.
  const int64_t newest = options.by_sigmas != 0 ? 0 : request.window / 8;
  if (recorded < options.warmup || recorded < static_cast<double>(newest + 2)) return kOrdinary;
  const auto kept = static_cast<int64_t>(merge::min(recorded, static_cast<double>(request.window)));
  const int64_t count = kept - newest;
  const int64_t oldest = recorded > request.window ? static_cast<int64_t>(recorded) % request.window : 0;
  const double* const wrapped = ring - request.window;
  const int64_t end = request.window - oldest;
  const auto at = [&](int64_t i) { return (i < end ? ring : wrapped)[oldest + i]; };
  double centre = 0, spread = 0;
  if (options.by_sigmas != 0) {
    const auto sum_of = [&](auto&& term) {
      double mine = 0;
      for (int64_t i = team.rank(); i < count; i += team.size()) mine += term(ring[i]);
      return team.all_reduce(mine, [](double a, double b) { return merge::sum(a, b); });
    };
    centre = sum_of([](double x) { return x; }) / static_cast<double>(count);
    spread =
        sqrt(sum_of([&](double x) { return (x - centre) * (x - centre); }) / static_cast<double>(count - 1));
  } else {
    // The three parts of the spread are those of gradstat.SpikeGuard.
    centre = quantile(team, at, count, 0.5);
    spread = 1.4826022185056018 * quantile(team, [&](int64_t i) { return fabs(at(i) - centre); }, count, 0.5);
    double largest = centre;
    for (int64_t i = team.rank(); i < count; i += team.size()) largest = merge::max(largest, at(i));
    largest = team.all_reduce(largest, [](double a, double b) { return merge::max(a, b); });
    spread = merge::max(merge::max(spread, 0.5 * (largest - centre)), 0.01 * fabs(centre));
  }
  return value - centre <= options.threshold * spread ? kOrdinary : kOutlier;
}

// Called by one thread.
GRADSTAT_HD void conclude(const GuardRequest& request, const int* judgements) {
  const GuardOptions& options = request.options;
  auto& totals = *reinterpret_cast<GuardTotals*>(request.state);
  bool is_finite = request.verdict[0] == 0, is_above = false;
  int flagged = 0;  // bits as in the reason
  for (int series = 0; series < kGuarded; ++series) {
    const int judgement = judgements[series];
    is_finite = is_finite && judgement != kNonfinite;
    is_above = is_above || judgement == kAboveLimit;
    flagged |= judgement == kAboveLimit || judgement == kOutlier ? 2 << series : 0;
  }
  // This many refusals in a row are a new level, not a spike: accept it and restart the statistics.
  const bool accepts_new_level =
      is_finite && flagged != 0 && !is_above && totals.in_a_row >= options.most_in_a_row;
  const bool refused = is_finite && flagged != 0 && !accepts_new_level;
  const int reason = !is_finite ? 1 : refused ? flagged : 0;
  for (int series = 0; series < kGuarded; ++series) {
    totals.by[series] += reason >> (series + 1) & 1;
    double& recorded = totals.recorded[series];
    recorded = accepts_new_level ? 0 : count_of(recorded);
    if (is_finite && judgements[series] != kMissing && (options.by_sigmas != 0 || !refused)) {
      double* const ring = request.state + kGuardTotals + series * request.window;
      ring[static_cast<int64_t>(recorded) % request.window] = value_of(request, series);
      recorded += 1;
    }
  }
  const bool scales = options.scale != 0 && refused;
  const bool skip = reason != 0 && !scales;
  const double multiplier = scales ? options.scale : 1.0;
  totals.steps += 1;
  totals.refused += refused ? 1 : 0;
  totals.nonfinite += is_finite ? 0 : 1;
  if (is_finite) totals.in_a_row = refused ? totals.in_a_row + 1 : 0;
  totals.reason = reason;
  request.scaling->multiplier *= multiplier;
  request.out[0] = skip ? 1.0f : 0.0f;
  request.out[1] = static_cast<float>(request.verdict[1] / multiplier);
  request.out[2] = request.verdict[2];
  request.out[3] = static_cast<float>(reason);
  count_step(request.counters, skip);
}

}  // namespace guards

}  // namespace gradstat

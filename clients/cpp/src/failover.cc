#include "failover.h"

#include <algorithm>
#include <utility>

namespace paceline {
namespace {

// Between two rounds through all addresses; doubles each round, unless a scheduler gives a hint.
constexpr Milliseconds MIN_WAIT{100};
constexpr Milliseconds MAX_WAIT{1'000};
// Losses in a row, with nothing received between them, that end a call: the call may be their cause.
constexpr int MAX_LOSSES = 4;

bool never_reached(const std::string& message) {
  return message.find("failed to connect") != std::string::npos ||
         message.find("DNS resolution failed") != std::string::npos ||
         message.find("errors resolving") != std::string::npos;
}

template <typename Duration>
Milliseconds rounded_up(Duration duration) {
  return std::chrono::ceil<Milliseconds>(duration);
}

}  // namespace

Attempts::Attempts(Rotation& rotation, Clock::time_point now, Timeout timeout, Milliseconds failover_timeout,
                   Milliseconds load_wait, Wanted call)
    : rotation_(rotation),
      call_(std::move(call)),
      failover_timeout_(failover_timeout),
      wait_(MIN_WAIT),
      load_wait_(load_wait) {
  if (timeout) deadline_ = now + *timeout;
  begin(order(now));
}

// Moves on to the first of these, with the others behind it.
void Attempts::begin(std::deque<std::string> addresses) {
  address_ = addresses.front();
  addresses.pop_front();
  untried_ = std::move(addresses);
}

void Attempts::drop_unknown() {
  const auto is_unknown = [&](const std::string& one) { return !rotation_.has(one); };
  untried_.erase(std::remove_if(untried_.begin(), untried_.end(), is_unknown), untried_.end());
}

void Attempts::skip(Clock::time_point now) {
  drop_unknown();
  begin(untried_.empty() ? order(now) : untried_);
}

Timeout Attempts::timeout(Clock::time_point now) const {
  if (!deadline_) return {};
  if (now >= *deadline_) throw Error(grpc::StatusCode::DEADLINE_EXCEEDED, "the timeout passed");
  return rounded_up(*deadline_ - now);
}

void Attempts::answered(const std::string& model) {
  if (answered_) return;
  answered_ = true;
  rotation_.up(address_);
  call_.begun_with = model.empty() ? rotation_.model_at(address_) : model;
}

Milliseconds Attempts::failed(const Error& error, Clock::time_point now) {
  if (error.code == grpc::StatusCode::UNAVAILABLE) rotation_.down(address_, now);
  if (is_lost(error)) {
    lose(error, now);
  } else if (lost_at_ && error.code == grpc::StatusCode::ALREADY_EXISTS) {
    // The lost attempt: its scheduler has not noticed yet that we are gone.
  } else if (error.retryable() && !answered_) {
    refusals_.push_back(error);
    if (error.reason == "NOT_READY" && loads_.empty()) loads_ = address_;
  } else if (is_no_last_word(error)) {
    std::stable_partition(untried_.begin(), untried_.end(),
                          [&](const std::string& one) { return rotation_.is_given(one); });
  } else {
    throw error;
  }
  answered_ = false;
  drop_unknown();
  if (untried_.empty() && !gone_over_) {  // all others are down or drain
    gone_over_ = true;
    for (const std::string& one : order(now)) {
      if (rotation_.is_foreign(one)) untried_.push_back(one);
    }
  }
  if (untried_.empty()) return next_round(error, now);
  begin(untried_);
  return Milliseconds{0};
}

// Whether a learned scheduler refused what a given one may take.
bool Attempts::is_no_last_word(const Error& error) const {
  if (rotation_.is_given(address_) || answered_) return false;
  return error.code == grpc::StatusCode::NOT_FOUND || error.code == grpc::StatusCode::UNAUTHENTICATED ||
         error.code == grpc::StatusCode::PERMISSION_DENIED || error.code == grpc::StatusCode::UNIMPLEMENTED;
}

// Whether the connection broke, or the scheduler ended, when it may have taken the call.
bool Attempts::is_lost(const Error& error) const {
  if (error.code != grpc::StatusCode::UNAVAILABLE) return false;
  const bool by_grpc = error.reason.empty() && !error.retry_after;
  return answered_ || (by_grpc && !never_reached(error.what()));
}

void Attempts::lose(const Error& error, Clock::time_point now) {
  losses_ = answered_ ? 1 : losses_ + 1;
  if (losses_ >= MAX_LOSSES) throw error;
  if (!answered_ && lost_at_) return;
  lost_at_ = now;
  wait_ = MIN_WAIT;
  refusals_.clear();
  untried_ = order(now);
  untried_.erase(std::remove(untried_.begin(), untried_.end(), address_), untried_.end());
}

Milliseconds Attempts::next_round(const Error& error, Clock::time_point now) {
  const auto soonest = std::min_element(refusals_.begin(), refusals_.end(), [](const Error& a, const Error& b) {
    return a.retry_after.value_or(Milliseconds::max()) < b.retry_after.value_or(Milliseconds::max());
  });
  if (!lost_at_ && rotation_.has(loads_) && !waits_ && load_wait_ > Milliseconds{0}) {
    address_ = loads_;
    refusals_.clear();
    waits_ = true;
    return Milliseconds{0};
  }
  const Error& for_caller = soonest == refusals_.end() ? error : *soonest;
  if (!lost_at_ || now >= *lost_at_ + failover_timeout_) throw Error(for_caller);
  Milliseconds wait = soonest != refusals_.end() && soonest->retry_after
                          ? std::max(*soonest->retry_after, MIN_WAIT)
                          : wait_;
  wait = std::min(wait, rounded_up(*lost_at_ + failover_timeout_ - now));
  if (deadline_) wait = std::clamp(rounded_up(*deadline_ - now), Milliseconds{0}, wait);
  wait_ = std::min(2 * wait_, MAX_WAIT);
  refusals_.clear();
  begin(order(now));
  return wait;
}

}  // namespace paceline

#include "failover.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "affinity.h"

namespace paceline {
namespace {

// How long an address that could not be reached is tried last; doubles with each further failure.
constexpr Milliseconds MIN_DOWN{1'000};
constexpr Milliseconds MAX_DOWN{8'000};
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

std::deque<size_t> Rotation::turn(const std::string& key) {
  std::deque<size_t> turn;
  if (key.empty()) {
    for (size_t i = 0; i < addresses_.size(); ++i) turn.push_back((next_ + i) % addresses_.size());
    next_ = (next_ + 1) % addresses_.size();
    return turn;
  }
  const std::vector<size_t> order = preference(key, addresses_);
  turn.push_back(choice(order, live_));
  std::remove_copy(order.begin(), order.end(), std::back_inserter(turn), size_t{turn.front()});
  return turn;
}

std::deque<size_t> Rotation::order(Clock::time_point now, const std::string& key) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::deque<size_t> order = turn(key);
  std::stable_partition(order.begin(), order.end(), [&](size_t address) { return !is_down(address, now); });
  return order;
}

void Rotation::up(size_t address) {
  std::lock_guard<std::mutex> lock(mutex_);
  down_[address] = {};
}

void Rotation::down(size_t address, Clock::time_point now) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_down(address, now)) return;
  const Milliseconds length = std::clamp(2 * down_[address].length, MIN_DOWN, MAX_DOWN);
  down_[address] = {now + length, length};
}

Attempts::Attempts(Rotation& rotation, Clock::time_point now, Timeout timeout, Milliseconds failover_timeout,
                   Milliseconds load_wait, std::string key)
    : rotation_(rotation),
      key_(std::move(key)),
      failover_timeout_(failover_timeout),
      untried_(rotation.order(now, key_)),
      wait_(MIN_WAIT),
      load_wait_(load_wait) {
  if (timeout) deadline_ = now + *timeout;
  address_ = untried_.front();
  untried_.pop_front();
}

Timeout Attempts::timeout(Clock::time_point now) const {
  if (!deadline_) return {};
  if (now >= *deadline_) throw Error(grpc::StatusCode::DEADLINE_EXCEEDED, "the timeout passed");
  return rounded_up(*deadline_ - now);
}

void Attempts::answered() {
  if (answered_) return;
  answered_ = true;
  rotation_.up(address_);
}

Milliseconds Attempts::failed(const Error& error, Clock::time_point now) {
  if (error.code == grpc::StatusCode::UNAVAILABLE) rotation_.down(address_, now);
  if (is_lost(error)) {
    lose(error, now);
  } else if (lost_at_ && error.code == grpc::StatusCode::ALREADY_EXISTS) {
    // The lost attempt: its scheduler has not noticed yet that we are gone.
  } else if (error.retryable() && !answered_) {
    refusals_.push_back(error);
    if (error.reason == "NOT_READY" && !loads_) loads_ = address_;
  } else {
    throw error;
  }
  answered_ = false;
  if (untried_.empty()) return next_round(error, now);
  address_ = untried_.front();
  untried_.pop_front();
  return Milliseconds{0};
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
  untried_ = rotation_.order(now, key_);
  untried_.erase(std::remove(untried_.begin(), untried_.end(), address_), untried_.end());
}

Milliseconds Attempts::next_round(const Error& error, Clock::time_point now) {
  const auto soonest = std::min_element(refusals_.begin(), refusals_.end(), [](const Error& a, const Error& b) {
    return a.retry_after.value_or(Milliseconds::max()) < b.retry_after.value_or(Milliseconds::max());
  });
  if (!lost_at_ && loads_ && !waits_ && load_wait_ > Milliseconds{0}) {
    address_ = *loads_;
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
  untried_ = rotation_.order(now, key_);
  address_ = untried_.front();
  untried_.pop_front();
  return wait;
}

}  // namespace paceline

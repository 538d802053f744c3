#include "rotation.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "affinity.h"

namespace paceline {
namespace {

// How long an address that could not be reached is tried last; doubles with each further failure.
constexpr Milliseconds MIN_DOWN{1'000};
constexpr Milliseconds MAX_DOWN{8'000};
// Addresses that a call tries in one round, the first ones of its order.
constexpr size_t MAX_TRIED = 64;
// Learned addresses that a call tries before a given one, at most: many dead entries hold nobody up.
constexpr ptrdiff_t TRIED_BEFORE_GIVEN = 8;

template <typename Is>
std::vector<std::string> filtered(const std::vector<std::string>& addresses, const Is& is) {
  std::vector<std::string> found;
  std::copy_if(addresses.begin(), addresses.end(), std::back_inserter(found), is);
  return found;
}

}  // namespace

Rotation::Rotation(const std::vector<std::string>& given) : given_(given.begin(), given.end()) {
  use(Present{given, {}, {}});
}

void Rotation::use(Present present) {
  std::lock_guard<std::mutex> lock(mutex_);
  present_ = std::move(present);
  known_ = {present_.addresses.begin(), present_.addresses.end()};
  for (auto one = down_.begin(); one != down_.end();) {
    one = known_.count(one->first) > 0 ? std::next(one) : down_.erase(one);
  }
}

std::deque<std::string> Rotation::order(Clock::time_point now, const Wanted& call) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Is is_up = [&](const std::string& one) { return !down_at(one, now); };
  const Is takes = [&](const std::string& one) { return !entry(one) || !entry(one)->drains; };
  const Is has_adapter = [&](const std::string& one) {
    return entry(one) && entry(one)->adapters.count(call.model) > 0;
  };
  const std::vector<std::string> addresses =
      candidates(call.begun_with, [&](const std::string& one) { return is_up(one) && takes(one); });
  const bool is_adapter = std::any_of(addresses.begin(), addresses.end(), has_adapter);
  const Is holds = [&](const std::string& one) { return !is_adapter || has_adapter(one); };
  std::deque<std::string> order =
      turn(call.key, addresses, [&](const std::string& one) { return holds(one) && takes(one); });
  for (const Is& is_sooner : {holds, takes, is_up}) std::stable_partition(order.begin(), order.end(), is_sooner);
  bring_given_forward(order);
  if (order.size() > MAX_TRIED) order.resize(MAX_TRIED);
  return order;
}

// The addresses with a call's model. `takes`: whether one takes new calls.
std::vector<std::string> Rotation::candidates(const std::string& begun_with, const Is& takes) const {
  const std::vector<std::string> found = filtered(present_.addresses, [&](const std::string& one) {
    return begun_with.empty() ? present_.foreign.count(one) == 0 : !entry(one) || entry(one)->model == begun_with;
  });
  const bool enough = begun_with.empty() ? std::any_of(found.begin(), found.end(), takes) : !found.empty();
  return enough ? found : present_.addresses;
}

// All of the addresses. A key's call begins with one of those that `is_first` says, if there are some.
std::deque<std::string> Rotation::turn(const std::string& key, const std::vector<std::string>& addresses,
                                       const Is& is_first) {
  std::deque<std::string> turn(addresses.begin(), addresses.end());
  if (key.empty() || addresses.size() == 1) {
    const size_t begin = next_ % addresses.size();
    std::rotate(turn.begin(), turn.begin() + begin, turn.end());
    next_ = begin + 1;
    return turn;
  }
  const std::vector<std::string> preferred = preference(key, addresses);
  const std::vector<std::string> takers = filtered(preferred, is_first);
  const auto live = [&](const std::string& one) {
    const auto found = live_.find(one);
    return found == live_.end() ? 0 : found->second;
  };
  const auto reported = [&](const std::string& one) { return entry(one) ? entry(one)->load : 0; };
  turn = {choice(takers.empty() ? preferred : takers, live, reported)};
  std::remove_copy(preferred.begin(), preferred.end(), std::back_inserter(turn), std::string(turn.front()));
  return turn;
}

void Rotation::bring_given_forward(std::deque<std::string>& turn) const {
  const auto given = std::find_if(turn.begin(), turn.end(), [&](const std::string& one) { return is_given(one); });
  if (given == turn.end() || given - turn.begin() <= TRIED_BEFORE_GIVEN) return;
  std::rotate(turn.begin() + TRIED_BEFORE_GIVEN, given, given + 1);
}

size_t Rotation::count() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return present_.addresses.size();
}

bool Rotation::has(const std::string& address) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return known_.count(address) > 0;
}

bool Rotation::is_foreign(const std::string& address) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return present_.foreign.count(address) > 0;
}

std::string Rotation::model_at(const std::string& address) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return entry(address) ? entry(address)->model : std::string();
}

Rotation::Live::Live(Rotation& rotation, const std::string& address) : rotation_(rotation), address_(address) {
  std::lock_guard<std::mutex> lock(rotation_.mutex_);
  ++rotation_.live_[address_];
}

Rotation::Live::~Live() {
  std::lock_guard<std::mutex> lock(rotation_.mutex_);
  const auto live = rotation_.live_.find(address_);
  if (--live->second == 0) rotation_.live_.erase(live);
}

void Rotation::up(const std::string& address) {
  std::lock_guard<std::mutex> lock(mutex_);
  down_.erase(address);
}

void Rotation::down(const std::string& address, Clock::time_point now) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (down_at(address, now)) return;
  Down& found = down_[address];
  found.length = std::clamp(2 * found.length, MIN_DOWN, MAX_DOWN);
  found.until = now + found.length;
}

bool Rotation::is_down(const std::string& address, Clock::time_point now) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return down_at(address, now);
}

bool Rotation::down_at(const std::string& address, Clock::time_point now) const {
  const auto found = down_.find(address);
  return found != down_.end() && found->second.until > now;
}

const Learned* Rotation::entry(const std::string& address) const {
  const auto found = present_.entries.find(address);
  return found == present_.entries.end() ? nullptr : &found->second;
}

}  // namespace paceline

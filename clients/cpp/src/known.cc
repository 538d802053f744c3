#include "known.h"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

namespace paceline {
namespace {

using std::chrono::seconds;

// Between two looks into a directory, while calls begin or streams run.
constexpr seconds LOOK_EVERY{10};
// From a look that failed to the next one, at another scheduler.
constexpr seconds LOOK_AGAIN{1};
// How long a scheduler that has said that it has no directory is not asked again.
constexpr seconds NO_DIRECTORY{300};
// Rounds of looks, one at each given scheduler, after which older words are dropped for newer ones.
constexpr int VIEW_ROUNDS = 3;
// Schedulers that a client learns of, at most.
constexpr size_t MAX_LEARNED = 1024;
// Liars that are remembered, at most.
constexpr size_t MAX_LIARS = 1024;

bool is_before(const std::map<std::string, Clock::time_point>& until, const std::string& name, Clock::time_point now) {
  const auto found = until.find(name);
  return found != until.end() && now < found->second;
}

template <typename Container, typename Is>
void erase_if(Container& container, Is is) {
  for (auto one = container.begin(); one != container.end();) one = is(*one) ? container.erase(one) : std::next(one);
}

}  // namespace

KnownSchedulers::KnownSchedulers(std::vector<std::string> given, bool has_tls, Directory use)
    : given_(std::move(given)), has_tls_(has_tls), use_(use), looked_(use == Directory::off) {}

bool KnownSchedulers::is_time_to_look(Clock::time_point now, const std::string& caller) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (use_ == Directory::off || now < next_look_ || is_before(refusals_, caller, now)) return false;
  next_look_ = now + LOOK_EVERY;
  return true;
}

std::string KnownSchedulers::teller(Clock::time_point now, const std::function<bool(const std::string&)>& is_down) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::string> asked = all();
  erase_if(asked, [&](const std::string& one) { return is_before(without_, one, now); });
  if (asked.empty()) asked = given_;
  std::rotate(asked.begin(), asked.begin() + ++turn_ % asked.size(), asked.end());
  const auto rank = [&](const std::string& one) {
    return std::make_tuple(silent_.count(one) > 0, is_down(one), is_foreign(one), !is_given(one));
  };
  return *std::min_element(asked.begin(), asked.end(),
                           [&](const std::string& a, const std::string& b) { return rank(a) < rank(b); });
}

void KnownSchedulers::saw(const std::string& teller, const std::vector<v1::SchedulerEntry>& entries,
                          Clock::time_point now) {
  std::lock_guard<std::mutex> lock(mutex_);
  looked_ = true;
  silent_.clear();
  const auto end = entries.begin() + std::min(entries.size(), MAX_ENTRIES);
  const auto own = std::find_if(entries.begin(), end, [](const auto& entry) { return entry.written_by().empty(); });
  if (own == end) return;
  const std::string& model = own->model_fingerprint();
  if (is_given(teller)) {
    own_.insert_or_assign(teller, Learned(*own));
  } else if (!model.empty() && !serves(teller, model)) {
    return leave(teller);
  }
  if (model.empty()) return;  // it is loading: what it listed before stays
  model_ = model;
  drop(teller);
  View& told = views_.emplace_back(View{teller, now, {}});
  for (auto entry = entries.begin(); entry != end; ++entry) {
    if (entry->model() == own->model() && !entry->model_fingerprint().empty() && !entry->instance().empty() &&
        (entry->instance() != own->instance() || entry->address() == teller) && may_get_a_token(*entry, teller)) {
      told.entries.emplace_back(*entry);
    }
  }
  age(now);
  join();
}

void KnownSchedulers::lost(const std::string& teller, Clock::time_point now) {
  std::lock_guard<std::mutex> lock(mutex_);
  looked_ = true;
  silent_.insert(teller);
  const std::vector<std::string> known = all();
  if (std::all_of(known.begin(), known.end(), [&](const std::string& one) { return silent_.count(one) > 0; })) {
    silent_.clear();
    next_look_ = now + LOOK_EVERY;
  } else {
    next_look_ = now + LOOK_AGAIN;
  }
  if (views_.size() < 2) return;
  drop(teller);
  age(now);
  join();
}

void KnownSchedulers::refused(const std::string& caller, Clock::time_point now) {
  std::lock_guard<std::mutex> lock(mutex_);
  looked_ = true;
  next_look_ = std::min(next_look_, now);
  erase_if(refusals_, [&](const auto& one) { return one.second <= now; });
  refusals_[caller] = now + LOOK_EVERY;
}

void KnownSchedulers::has_none(const std::string& teller, Clock::time_point now) {
  std::lock_guard<std::mutex> lock(mutex_);
  looked_ = true;
  drop(teller);
  age(now);
  join();
  const std::vector<std::string> known = all();
  const std::set<std::string> addresses(known.begin(), known.end());
  erase_if(without_, [&](const auto& one) { return addresses.count(one.first) == 0; });
  without_[teller] = now + NO_DIRECTORY;
  next_look_ = now;
  if (without_.size() < known.size()) return;
  next_look_ = std::min_element(without_.begin(), without_.end(), [](const auto& a, const auto& b) {
                 return a.second < b.second;
               })->second;
}

void KnownSchedulers::distrust(const std::string& address) {
  std::lock_guard<std::mutex> lock(mutex_);
  leave(address);
}

Present KnownSchedulers::present() const {
  std::lock_guard<std::mutex> lock(mutex_);
  Present found{all(), learned_, {}};
  found.entries.insert(own_.begin(), own_.end());
  for (const std::string& one : order_) {
    if (is_foreign(one)) found.foreign.insert(one);
  }
  return found;
}

bool KnownSchedulers::is_given(const std::string& address) const {
  return std::find(given_.begin(), given_.end(), address) != given_.end();
}

bool KnownSchedulers::has_looked() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return looked_;
}

std::optional<std::string> KnownSchedulers::tls_name(const std::string& address) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = learned_.find(address);
  if (found == learned_.end()) return {};
  return found->second.tls_name;
}

bool KnownSchedulers::is_what_it_says(const std::string& address, const std::string& model) {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_given(address) || serves(address, model);
}

bool KnownSchedulers::is_checked(const std::string& address) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = learned_.find(address);
  return is_given(address) || (found != learned_.end() && checked_.count(found->second.start) > 0);
}

std::vector<std::string> KnownSchedulers::all() const {
  std::vector<std::string> found = given_;
  found.insert(found.end(), order_.begin(), order_.end());
  return found;
}

bool KnownSchedulers::is_foreign(const std::string& address) const {
  const auto found = learned_.find(address);
  return found != learned_.end() && found->second.model != model_;
}

// Whether the model is that of the learned scheduler's entry, which then counts as checked.
bool KnownSchedulers::serves(const std::string& address, const std::string& model) {
  const auto found = learned_.find(address);
  if (found == learned_.end() || found->second.model != model) return false;
  checked_.insert(found->second.start);
  return true;
}

bool KnownSchedulers::may_get_a_token(const v1::SchedulerEntry& entry, const std::string& teller) const {
  if (!is_host_port(entry.address())) return false;
  if (has_tls_) return !entry.tls_name().empty();
  if (!entry.tls_name().empty()) return false;  // it speaks TLS, and the client knows no authority
  if (is_loopback(entry.address())) return is_local(teller);
  return use_ == Directory::any;
}

void KnownSchedulers::leave(const std::string& address) {
  const auto found = learned_.find(address);
  if (found == learned_.end()) return;
  liars_[found->second.start] = ++found_;
  erase_if(liars_, [&](const auto& one) { return one.second + MAX_LIARS <= found_; });
  join();
}

void KnownSchedulers::drop(const std::string& teller) {
  erase_if(views_, [&](const View& one) { return one.teller == teller; });
}

// Drops what was told long ago, once somebody has told more since.
void KnownSchedulers::age(Clock::time_point now) {
  Clock::time_point oldest = now - VIEW_ROUNDS * LOOK_EVERY * static_cast<int>(given_.size());
  Clock::time_point newest = Clock::time_point::min();
  for (const View& one : views_) newest = std::max(newest, one.at);
  oldest = std::min(oldest, newest);
  erase_if(views_, [&](const View& one) { return one.at < oldest; });
}

// Joins what all have listed: a scheduler is known while one of them lists it. The word of a given scheduler counts
// more than that of a learned one, and a newer more than an older.
void KnownSchedulers::join() {
  std::vector<const View*> views;
  for (const View& one : views_) views.push_back(&one);
  std::stable_sort(views.begin(), views.end(), [&](const View* a, const View* b) {
    return std::make_pair(is_given(a->teller), a->at) < std::make_pair(is_given(b->teller), b->at);
  });
  std::map<std::string, const Learned*> listed;  // by address
  for (const View* view : views) {
    for (const Learned& one : view->entries) listed[one.start.first] = &one;
  }
  std::vector<const Learned*> sorted;
  for (const auto& [address, one] : listed) sorted.push_back(one);
  std::stable_partition(sorted.begin(), sorted.end(), [&](const Learned* one) { return one->model == model_; });
  std::set<std::string> instances;
  for (const auto& [address, one] : own_) instances.insert(one.start.second);
  std::set<StartAt> checked;
  learned_.clear();
  order_.clear();
  for (const Learned* one : sorted) {
    const auto& [address, instance] = one->start;
    if (is_given(address) || liars_.count(one->start) > 0 || order_.size() == MAX_LEARNED) continue;
    if (!instances.insert(instance).second) continue;
    learned_.emplace(address, *one);
    order_.push_back(address);
    if (checked_.count(one->start) > 0) checked.insert(one->start);
  }
  checked_ = std::move(checked);
}

}  // namespace paceline

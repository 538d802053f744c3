// Which of its schedulers a call tries, and in which order. No I/O: time is passed in.

#pragma once

#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "clock.h"
#include "known.h"

namespace paceline {

// What a call needs of the schedulers that it tries.
struct Wanted {
  std::string key;         // of affinity_key; empty: in turn
  std::string model;       // what the request names: those that have an adapter of this name come first
  std::string begun_with;  // the fingerprint of a stream's model, which alone can continue it; empty: not known
};

// The order in which the calls of a client try its addresses. A call with a key begins where that key's prompts are
// cached, unless there are too many calls there (AFFINITY in scheduler.proto); one without begins with the next address
// in turn. Those that are down come last. Safe for concurrent use.
class Rotation {
 public:
  explicit Rotation(const std::vector<std::string>& given);

  // Calls that begin from now on try these.
  void use(Present present);

  // The addresses that a call should try: all, up to MAX_TRIED. A call that has not begun tries foreign ones where all
  // others are down or drain.
  std::deque<std::string> order(Clock::time_point now, const Wanted& call);

  size_t count() const;

  // Whether an address is still one of them.
  bool has(const std::string& address) const;

  bool is_given(const std::string& address) const { return given_.count(address) > 0; }

  // Whether it has another model than the present one.
  bool is_foreign(const std::string& address) const;

  // The fingerprint of the model there; empty: not known.
  std::string model_at(const std::string& address) const;

  // A call at an address, counted as live until this is destroyed.
  class Live {
   public:
    Live(Rotation& rotation, const std::string& address);
    ~Live();
    Live(const Live&) = delete;
    Live& operator=(const Live&) = delete;

   private:
    Rotation& rotation_;
    const std::string address_;
  };

  // It has answered.
  void up(const std::string& address);

  // It could not be reached, or takes no requests. Of several calls that find out, the first counts.
  void down(const std::string& address, Clock::time_point now);

  // Whether it could not be reached a short while ago.
  bool is_down(const std::string& address, Clock::time_point now) const;

 private:
  using Is = std::function<bool(const std::string&)>;

  struct Down {
    Clock::time_point until;
    Milliseconds length;
  };

  // What follows is called with the mutex held.
  bool down_at(const std::string& address, Clock::time_point now) const;
  const Learned* entry(const std::string& address) const;
  std::vector<std::string> candidates(const std::string& begun_with, const Is& takes) const;
  std::deque<std::string> turn(const std::string& key, const std::vector<std::string>& addresses, const Is& is_first);
  void bring_given_forward(std::deque<std::string>& turn) const;

  const std::set<std::string> given_;
  mutable std::mutex mutex_;
  Present present_;
  std::set<std::string> known_;  // addresses
  size_t next_ = 0;
  std::map<std::string, uint64_t> live_;  // the client's own calls, by address
  std::map<std::string, Down> down_;      // those that are down, or were and have not answered since
};

}  // namespace paceline

// Which scheduler a call goes to, and where next when one refuses it or dies. No I/O: time is passed in.

#pragma once

#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "clock.h"
#include "paceline/client.h"
#include "paceline/error.h"

namespace paceline {

// The order in which the calls of a client try its addresses, which are indexes. A call with a key begins where that
// key's prompts are cached, unless the client has too many live calls there (AFFINITY in scheduler.proto); one without
// begins with the next address in turn. Those that are down come last. Safe for concurrent use.
class Rotation {
 public:
  explicit Rotation(const std::vector<std::string>& addresses)
      : addresses_(addresses), live_(addresses.size()), down_(addresses.size()) {}

  // All addresses. `key`: of affinity_key, or empty.
  std::deque<size_t> order(Clock::time_point now, const std::string& key);

  // A call at an address, counted as live until this is destroyed.
  class Live {
   public:
    Live(Rotation& rotation, size_t address) : rotation_(rotation), address_(address) { count(1); }
    ~Live() { count(-1); }
    Live(const Live&) = delete;
    Live& operator=(const Live&) = delete;

   private:
    void count(int calls) {
      std::lock_guard<std::mutex> lock(rotation_.mutex_);
      rotation_.live_[address_] += calls;
    }

    Rotation& rotation_;
    size_t address_;
  };

  // It has answered.
  void up(size_t address);

  // It could not be reached, or takes no requests. Of several calls that find out, the first counts.
  void down(size_t address, Clock::time_point now);

 private:
  struct Down {
    Clock::time_point until{};
    Milliseconds length{0};  // 0: the address is up
  };

  bool is_down(size_t address, Clock::time_point now) const { return down_[address].until > now; }

  std::deque<size_t> turn(const std::string& key);

  const std::vector<std::string> addresses_;
  std::mutex mutex_;
  size_t next_ = 0;
  std::vector<size_t> live_;  // calls, by address
  std::vector<Down> down_;    // by address
};

// The attempts of one call.
//
// A refused attempt (by the scheduler, or because it can't be reached) moves on to the next address; when all have
// refused, the error is the caller's. But if one of them has no executor yet, because a model is loading, the call is
// sent there once more and waits there for up to `load_wait`. A lost attempt (the connection broke, or the scheduler
// ended the call UNAVAILABLE in mid-stream) is repeated at once on each other address, then on all of them for up to
// `failover_timeout`.
class Attempts {
 public:
  // `key`: of affinity_key; empty: the call begins with the next address in turn.
  Attempts(Rotation& rotation, Clock::time_point now, Timeout timeout, Milliseconds failover_timeout,
           Milliseconds load_wait, std::string key = {});

  // Of the current attempt.
  size_t address() const { return address_; }

  // How long the current attempt waits at its scheduler for a model that is loading; 0: not at all.
  Milliseconds load_wait() const { return waits_ ? load_wait_ : Milliseconds{0}; }

  // The rest of the caller's timeout. Throws Error at its end.
  Timeout timeout(Clock::time_point now) const;

  // The current attempt has received a message.
  void answered();

  // The current attempt has failed: moves `address` on, and returns the time to wait before that attempt. Throws the
  // error for the caller if there is to be none.
  Milliseconds failed(const Error& error, Clock::time_point now);

 private:
  bool is_lost(const Error& error) const;
  void lose(const Error& error, Clock::time_point now);
  Milliseconds next_round(const Error& error, Clock::time_point now);

  Rotation& rotation_;
  std::string key_;
  std::optional<Clock::time_point> deadline_;
  Milliseconds failover_timeout_;
  std::deque<size_t> untried_;
  size_t address_ = 0;
  bool answered_ = false;        // the current attempt has received a message
  std::vector<Error> refusals_;  // in this round through the addresses
  std::optional<Clock::time_point> lost_at_;
  int losses_ = 0;  // in a row, since the last message
  Milliseconds wait_;
  Milliseconds load_wait_;
  std::optional<size_t> loads_;  // address of a scheduler that had no executor yet
  bool waits_ = false;           // the current attempt waits for its model
};

}  // namespace paceline

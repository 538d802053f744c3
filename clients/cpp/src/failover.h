// Which scheduler a call goes to, and where next when one refuses it or dies. No I/O: time is passed in.

#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "paceline/client.h"
#include "paceline/error.h"

namespace paceline {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

// The order in which the calls of a client try its addresses, which are indexes: each call begins with the next one
// in turn, and those that are down come last. Safe for concurrent use.
class Rotation {
 public:
  explicit Rotation(size_t count) : down_(count) {}

  std::deque<size_t> order(Clock::time_point now);

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

  std::mutex mutex_;
  size_t next_ = 0;
  std::vector<Down> down_;  // by address
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
  Attempts(Rotation& rotation, Clock::time_point now, Timeout timeout, Milliseconds failover_timeout,
           Milliseconds load_wait);

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

// Which scheduler a call goes to, and where next when one refuses it or dies. No I/O: time is passed in.

#pragma once

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "clock.h"
#include "paceline/client.h"
#include "paceline/error.h"
#include "rotation.h"

namespace paceline {

// The attempts of one call.
//
// A refused attempt (by the scheduler, or because it can't be reached) moves on to the next address; when all have
// refused, the error is the caller's. But if one of them has no executor yet, because a model is loading, the call is
// sent there once more and waits there for up to `load_wait`. A lost attempt (the connection broke, or the scheduler
// ended the call UNAVAILABLE in mid-stream) is repeated at once on each other address, then on all of them for up to
// `failover_timeout`. What a learned scheduler does not know or let in, a given one decides.
class Attempts {
 public:
  Attempts(Rotation& rotation, Clock::time_point now, Timeout timeout, Milliseconds failover_timeout,
           Milliseconds load_wait, Wanted call = {});

  // Of the current attempt.
  const std::string& address() const { return address_; }

  // Moves `address` on: the current one is known no more.
  void skip(Clock::time_point now);

  // How long the current attempt waits at its scheduler for a model that is loading; 0: not at all.
  Milliseconds load_wait() const { return waits_ ? load_wait_ : Milliseconds{0}; }

  // The rest of the caller's timeout. Throws Error at its end.
  Timeout timeout(Clock::time_point now) const;

  // The current attempt has received a message. `model`: the fingerprint that it tells.
  void answered(const std::string& model = {});

  // The current attempt has failed: moves `address` on, and returns the time to wait before that attempt. Throws the
  // error for the caller if there is to be none.
  Milliseconds failed(const Error& error, Clock::time_point now);

 private:
  std::deque<std::string> order(Clock::time_point now) { return rotation_.order(now, call_); }
  void begin(std::deque<std::string> addresses);
  void drop_unknown();
  bool is_lost(const Error& error) const;
  bool is_no_last_word(const Error& error) const;
  void lose(const Error& error, Clock::time_point now);
  Milliseconds next_round(const Error& error, Clock::time_point now);

  Rotation& rotation_;
  Wanted call_;
  std::optional<Clock::time_point> deadline_;
  Milliseconds failover_timeout_;
  std::deque<std::string> untried_;
  std::string address_;
  bool answered_ = false;        // the current attempt has received a message
  std::vector<Error> refusals_;  // in this round through the addresses
  std::optional<Clock::time_point> lost_at_;
  int losses_ = 0;  // in a row, since the last message
  Milliseconds wait_;
  Milliseconds load_wait_;
  bool gone_over_ = false;  // foreign ones were tried
  std::string loads_;       // address of a scheduler that had no executor yet
  bool waits_ = false;      // the current attempt waits for its model
};

}  // namespace paceline

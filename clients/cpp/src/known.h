// The schedulers that a client uses: DIRECTORY in scheduler.proto. No I/O: time is passed in.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "clock.h"
#include "entry.h"
#include "paceline/client.h"

namespace paceline {

// Entries of one look that are read: as many as a directory has at most.
constexpr size_t MAX_ENTRIES = 10'000;

// The schedulers that calls use at one time.
struct Present {
  std::vector<std::string> addresses;      // the given ones, then the learned ones
  std::map<std::string, Learned> entries;  // by address: of those that a directory has
  std::set<std::string> foreign;           // learned ones with another model of the same name, as in an update's middle
};

// The addresses given by the user, which stay, and those learned from the directories of schedulers. Safe for
// concurrent use.
//
// Entries are claims: here is decided which get a token. A learned address is used only for a model of the same name as
// that of the scheduler which listed it, and for another fingerprint only once none of the present one takes calls
// (`foreign`). With Directory::safe it is used over TLS, by the authority that the client trusts already and under the
// name that the entry gives; or without TLS on loopback, if the scheduler which listed it is on this machine too. With
// Directory::any also without TLS elsewhere, if the client has no authority. A scheduler is known once, however many
// addresses it has.
class KnownSchedulers {
 public:
  KnownSchedulers(std::vector<std::string> given, bool has_tls, Directory use);

  // Whether it is time for a look into a directory; if so, the time of the next one is set.
  bool is_time_to_look(Clock::time_point now, const std::string& caller);

  // Whom to ask: a given one that is up, in turn; else a learned one; else one that is down. One at which a look has
  // just failed comes last, though it may count as up again by now.
  std::string teller(Clock::time_point now, const std::function<bool(const std::string&)>& is_down);

  // These are all entries of the directory of the scheduler at `teller`.
  void saw(const std::string& teller, const std::vector<v1::SchedulerEntry>& entries, Clock::time_point now);

  // The directory of `teller` could not be had: what it listed is kept if it is all.
  void lost(const std::string& teller, Clock::time_point now);

  // A scheduler did not let this caller look: others may look at once.
  void refused(const std::string& caller, Clock::time_point now);

  // The scheduler at `teller` has no directory.
  void has_none(const std::string& teller, Clock::time_point now);

  // What is at a learned address is not what its entry says: it is used no more, until it is another start of a
  // scheduler.
  void distrust(const std::string& address);

  Present present() const;

  bool is_given(const std::string& address) const;

  // Whether a look has ended, well or not.
  bool has_looked() const;

  // The name that the certificate of a learned scheduler has, empty without TLS; none: its address is not known, or no
  // more.
  std::optional<std::string> tls_name(const std::string& address) const;

  // Whether a scheduler that reports this model may be the one of the entry; given ones always are.
  bool is_what_it_says(const std::string& address, const std::string& model);

  // Whether it has reported the model of its entry since its start, or is a given one.
  bool is_checked(const std::string& address) const;

 private:
  // What one scheduler listed of others.
  struct View {
    std::string teller;
    Clock::time_point at;
    std::vector<Learned> entries;
  };

  // What follows is called with the mutex held.
  std::vector<std::string> all() const;
  bool is_foreign(const std::string& address) const;
  bool serves(const std::string& address, const std::string& model);
  bool may_get_a_token(const v1::SchedulerEntry& entry, const std::string& teller) const;
  void leave(const std::string& address);
  void drop(const std::string& teller);
  void age(Clock::time_point now);
  void join();

  const std::vector<std::string> given_;
  const bool has_tls_;
  const Directory use_;

  mutable std::mutex mutex_;
  std::vector<View> views_;                 // one of each scheduler that has listed others
  std::map<std::string, Learned> own_;      // by given address: what it says of itself
  std::map<std::string, Learned> learned_;  // by address
  std::vector<std::string> order_;          // of the learned addresses
  std::map<StartAt, uint64_t> liars_;       // how many were found before
  uint64_t found_ = 0;                      // liars, ever
  std::set<StartAt> checked_;               // those that serve the model of their entry
  Clock::time_point next_look_ = Clock::time_point::min();
  std::map<std::string, Clock::time_point> without_;   // by address: until when it is not asked for a directory
  std::map<std::string, Clock::time_point> refusals_;  // by caller: until when it does not look
  size_t turn_ = 0;
  std::string model_;             // the fingerprint that new calls get
  std::set<std::string> silent_;  // those at which looks failed since the last one that did not
  bool looked_;
};

}  // namespace paceline

package paceline

import (
	"sync"
	"time"

	"github.com/paceline/paceline/clients/go/schedulerv1"
)

// DirectoryUse says which schedulers of a directory a client uses.
type DirectoryUse string

// The values of WithDirectory.
const (
	DirectoryOff  DirectoryUse = "off"
	DirectorySafe DirectoryUse = "safe"
	DirectoryAny  DirectoryUse = "any"
)

const (
	// Time between two looks into a directory, while calls begin or streams run.
	lookEvery = 10 * time.Second
	// Time from a look that failed to the next one, at another scheduler.
	lookAgain = 1 * time.Second
	// Time for which a scheduler that has said that it has no directory is not asked again.
	noDirectory = 300 * time.Second
	// Rounds of looks, one at each given scheduler, after which older words are dropped for newer ones.
	viewRounds = 3
	// Schedulers that a client learns of, at most.
	maxLearned = 1024
	// Entries of one look that are read: as many as a directory has at most.
	maxEntries = 10_000
	// Liars that are remembered, at most.
	maxLiars = 1024
)

// knownSchedulers are the addresses given by the user, which stay, and those learned from the directories of
// schedulers. Pure: time is passed in. Safe for concurrent use.
//
// Entries are claims of whoever wrote them: here is decided which get a token. A learned address is used only for a
// model of the same name as that of the scheduler which listed it, and for another fingerprint only once none of the
// present one takes calls (isForeign). With DirectorySafe it is used over TLS, by the authority that the client trusts
// already and under the name that the entry gives; or without TLS on loopback, if the scheduler which listed it is on
// this machine too. With DirectoryAny also without TLS elsewhere, if the client has no authority. A scheduler is known
// once, however many addresses it has.
type knownSchedulers struct {
	given  []string
	hasTLS bool
	use    DirectoryUse

	mutex    sync.Mutex
	views    []view               // one of each scheduler that has listed others
	own      map[string]learned   // by given address: what it says of itself
	learned  map[string]learned   // by address
	order    []string             // of the learned addresses
	liars    map[startAt]int      // how many were found before
	found    int                  // liars, ever
	checked  map[startAt]bool     // those that serve the model
	nextLook time.Time            // zero: at once
	without  map[string]time.Time // by address: until when it is not asked for a directory
	refusals map[string]time.Time // by caller: until when it does not look
	turn     int
	model    string          // the fingerprint that new calls get
	silent   map[string]bool // those at which looks failed since the last one that did not
	looked   bool            // a look has ended, well or not
}

// view is what one scheduler listed of others.
type view struct {
	teller  string
	at      time.Time
	entries []learned
}

func newKnownSchedulers(given []string, hasTLS bool, use DirectoryUse) *knownSchedulers {
	return &knownSchedulers{
		given: given, hasTLS: hasTLS, use: use, looked: use == DirectoryOff,
		own: map[string]learned{}, learned: map[string]learned{}, liars: map[startAt]int{}, checked: map[startAt]bool{},
		without: map[string]time.Time{}, refusals: map[string]time.Time{}, silent: map[string]bool{},
	}
}

// isTimeToLook reports whether it is time for a look into a directory; if so, the time of the next one is set.
func (k *knownSchedulers) isTimeToLook(now time.Time, caller string) bool {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	if k.use == DirectoryOff || now.Before(k.nextLook) || now.Before(k.refusals[caller]) {
		return false
	}
	k.nextLook = now.Add(lookEvery)
	return true
}

// teller is whom to ask: a given one that is up, in turn; else a learned one; else one that is down. One at which a
// look has just failed comes last, though it may count as up again by now.
func (k *knownSchedulers) teller(now time.Time, isDown func(string, time.Time) bool) string {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	k.turn++
	asked := []string{}
	for _, one := range k.all() {
		if !now.Before(k.without[one]) {
			asked = append(asked, one)
		}
	}
	if len(asked) == 0 {
		asked = k.given
	}
	begin := k.turn % len(asked)
	turn := append(append([]string{}, asked[begin:]...), asked[:begin]...)
	sortLast(turn,
		func(one string) bool { return k.silent[one] },
		func(one string) bool { return isDown(one, now) },
		k.isForeign,
		func(one string) bool { return !k.isGiven(one) })
	return turn[0]
}

// saw records all entries of the directory of the scheduler at teller.
func (k *knownSchedulers) saw(teller string, entries []*schedulerv1.SchedulerEntry, now time.Time) {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	k.looked, k.silent = true, map[string]bool{}
	if len(entries) > maxEntries {
		entries = entries[:maxEntries]
	}
	var own *schedulerv1.SchedulerEntry
	for _, entry := range entries {
		if entry.GetWrittenBy() == "" {
			own = entry
			break
		}
	}
	if own == nil {
		return
	}
	model := string(own.GetModelFingerprint())
	if k.isGiven(teller) {
		k.own[teller] = learnedOf(own)
	} else if model != "" && !k.serves(teller, model) {
		k.leave(teller)
		return
	}
	if model == "" {
		return // it is loading: what it listed before stays
	}
	k.model = model
	told := view{teller: teller, at: now}
	for _, entry := range entries {
		if entry.GetModel() == own.GetModel() && len(entry.GetModelFingerprint()) > 0 && entry.GetInstance() != "" &&
			(entry.GetInstance() != own.GetInstance() || entry.GetAddress() == teller) && k.mayGetAToken(entry, teller) {
			told.entries = append(told.entries, learnedOf(entry))
		}
	}
	if i := k.viewOf(teller); i >= 0 {
		k.views[i] = told
	} else {
		k.views = append(k.views, told)
	}
	k.age(now)
	k.join()
}

// lost records that the directory of teller could not be had: what it listed is kept if it is all.
func (k *knownSchedulers) lost(teller string, now time.Time) {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	k.looked = true
	k.silent[teller] = true
	if k.allSilent() {
		k.silent, k.nextLook = map[string]bool{}, now.Add(lookEvery)
	} else {
		k.nextLook = now.Add(lookAgain)
	}
	if len(k.views) > 1 {
		k.drop(teller)
		k.age(now)
		k.join()
	}
}

// refused records that a scheduler did not let this caller look: others may look at once.
func (k *knownSchedulers) refused(caller string, now time.Time) {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	k.looked = true
	if now.Before(k.nextLook) {
		k.nextLook = now
	}
	for one, until := range k.refusals {
		if !now.Before(until) {
			delete(k.refusals, one)
		}
	}
	k.refusals[caller] = now.Add(lookEvery)
}

// hasNone records that the scheduler at teller has no directory.
func (k *knownSchedulers) hasNone(teller string, now time.Time) {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	k.looked = true
	k.drop(teller)
	k.age(now)
	k.join()
	without := map[string]time.Time{}
	for _, one := range k.all() {
		if until, ok := k.without[one]; ok {
			without[one] = until
		}
	}
	without[teller] = now.Add(noDirectory)
	k.without, k.nextLook = without, now
	if len(without) >= len(k.all()) {
		k.nextLook = without[teller]
		for _, until := range without {
			if until.Before(k.nextLook) {
				k.nextLook = until
			}
		}
	}
}

// distrust records that what is at a learned address is not what its entry says: it is used no more, until it is
// another start of a scheduler.
func (k *knownSchedulers) distrust(address string) {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	k.leave(address)
}

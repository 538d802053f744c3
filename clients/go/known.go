package paceline

import (
	"sort"
	"time"

	"github.com/paceline/paceline/clients/go/schedulerv1"
)

// schedulers are those that calls use at one time.
type schedulers struct {
	addresses []string           // the given ones, then the learned ones
	entries   map[string]learned // by address: of those that a directory has
	foreign   map[string]bool    // learned ones with another model of the same name, as in the middle of an update
}

// present are the schedulers that are known now.
func (k *knownSchedulers) present() schedulers {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	found := schedulers{addresses: k.all(), entries: map[string]learned{}, foreign: map[string]bool{}}
	for address, one := range k.own {
		found.entries[address] = one
	}
	for address, one := range k.learned {
		found.entries[address] = one
		if k.isForeign(address) {
			found.foreign[address] = true
		}
	}
	return found
}

// hasLooked reports whether a look has ended, well or not.
func (k *knownSchedulers) hasLooked() bool {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	return k.looked
}

// tlsName is the name that the certificate of a learned scheduler has, "" without TLS; false: its address is not known,
// or no more.
func (k *knownSchedulers) tlsName(address string) (string, bool) {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	one, ok := k.learned[address]
	return one.tlsName, ok
}

// isWhatItSays reports whether a scheduler that reports this model may be the one of the entry; given ones always are.
func (k *knownSchedulers) isWhatItSays(address, model string) bool {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	return k.isGiven(address) || k.serves(address, model)
}

// isChecked reports whether it has reported the model of its entry since its start, or is a given one.
func (k *knownSchedulers) isChecked(address string) bool {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	one, ok := k.learned[address]
	return k.isGiven(address) || ok && k.checked[one.startAt]
}

// What follows is called with the mutex held.

func (k *knownSchedulers) all() []string { return append(append([]string{}, k.given...), k.order...) }

func (k *knownSchedulers) isGiven(address string) bool {
	for _, one := range k.given {
		if one == address {
			return true
		}
	}
	return false
}

func (k *knownSchedulers) isForeign(address string) bool {
	one, ok := k.learned[address]
	return ok && one.model != k.model
}

func (k *knownSchedulers) allSilent() bool {
	for _, one := range k.all() {
		if !k.silent[one] {
			return false
		}
	}
	return true
}

// serves reports whether the model is that of the learned scheduler's entry, which then counts as checked.
func (k *knownSchedulers) serves(address, model string) bool {
	one, ok := k.learned[address]
	if !ok || one.model != model {
		return false
	}
	k.checked[one.startAt] = true
	return true
}

func (k *knownSchedulers) leave(address string) {
	one, ok := k.learned[address]
	if !ok {
		return
	}
	k.found++
	k.liars[one.startAt] = k.found
	for liar, number := range k.liars {
		if number <= k.found-maxLiars {
			delete(k.liars, liar)
		}
	}
	k.join()
}

func (k *knownSchedulers) mayGetAToken(entry *schedulerv1.SchedulerEntry, teller string) bool {
	switch address := entry.GetAddress(); {
	case !hostPort.MatchString(address) || noHost.MatchString(address):
		return false
	case k.hasTLS:
		return entry.GetTlsName() != ""
	case entry.GetTlsName() != "":
		return false // it speaks TLS, and the client knows no authority
	case isLoopback(address):
		return isLocal(teller)
	}
	return k.use == DirectoryAny
}

func (k *knownSchedulers) viewOf(teller string) int {
	for i, one := range k.views {
		if one.teller == teller {
			return i
		}
	}
	return -1
}

func (k *knownSchedulers) drop(teller string) {
	if i := k.viewOf(teller); i >= 0 {
		k.views = append(k.views[:i], k.views[i+1:]...)
	}
}

// age drops what was told long ago, once somebody has told more since.
func (k *knownSchedulers) age(now time.Time) {
	oldest := now.Add(-viewRounds * lookEvery * time.Duration(len(k.given)))
	newest := time.Time{}
	for _, one := range k.views {
		if one.at.After(newest) {
			newest = one.at
		}
	}
	if newest.Before(oldest) {
		oldest = newest
	}
	kept := []view{}
	for _, one := range k.views {
		if !one.at.Before(oldest) {
			kept = append(kept, one)
		}
	}
	k.views = kept
}

// join joins what all have listed: a scheduler is known while one of them lists it. The word of a given scheduler counts
// more than that of a learned one, and a newer more than an older.
func (k *knownSchedulers) join() {
	views := append([]view{}, k.views...)
	sort.SliceStable(views, func(i, j int) bool {
		if a, b := k.isGiven(views[i].teller), k.isGiven(views[j].teller); a != b {
			return b
		}
		return views[i].at.Before(views[j].at)
	})
	listed := map[string]learned{}
	for _, told := range views {
		for _, one := range told.entries {
			listed[one.address] = one
		}
	}
	order := []string{}
	for address := range listed {
		order = append(order, address)
	}
	sort.Strings(order)
	sortLast(order, func(one string) bool { return listed[one].model != k.model })
	instances := map[string]bool{}
	for _, one := range k.own {
		instances[one.instance] = true
	}
	k.learned, k.order = map[string]learned{}, nil
	checked := map[startAt]bool{}
	for _, address := range order {
		one := listed[address]
		_, lied := k.liars[one.startAt]
		if k.isGiven(address) || lied || instances[one.instance] || len(k.order) == maxLearned {
			continue
		}
		instances[one.instance] = true
		k.learned[address], k.order = one, append(k.order, address)
		if k.checked[one.startAt] {
			checked[one.startAt] = true
		}
	}
	k.checked = checked
}

// sortLast moves addresses of which something is true behind the others, which keep their order. What comes first of
// several counts more.
func sortLast(addresses []string, last ...func(string) bool) {
	sort.SliceStable(addresses, func(i, j int) bool {
		for _, is := range last {
			if a, b := is(addresses[i]), is(addresses[j]); a != b {
				return b
			}
		}
		return false
	})
}

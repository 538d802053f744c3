package paceline

import (
	"sync"
	"time"
)

const (
	// Time for which an address that could not be reached is tried last; doubles with each further failure.
	minDown = 1 * time.Second
	maxDown = 8 * time.Second
	// Addresses that a call tries in one round, the first ones of its order.
	maxTried = 64
	// Learned addresses that a call tries before a given one, at most: many dead entries hold nobody up.
	triedBeforeGiven = 8
)

// rotation is the order in which the calls of a client try its addresses. A call with a key begins where that key's
// prompts are cached, unless there are too many calls there (AFFINITY in scheduler.proto); one without begins with the
// next address in turn. Those that are down come last. Safe for concurrent use.
type rotation struct {
	given map[string]bool
	mutex sync.Mutex
	schedulers
	known map[string]bool // addresses
	next  int
	live  map[string]int      // the client's own calls, by address
	down  map[string]downTime // by address, of those that are down or were and have not answered since
}

type downTime struct {
	until  time.Time
	length time.Duration
}

// wanted is what a call needs of the schedulers that it tries.
type wanted struct {
	key       []byte // of affinityKey; nil: in turn
	model     string // what the request names: those that have an adapter of this name come first
	begunWith string // the fingerprint of a stream's model, which alone can continue it; "": none, or not known
}

func newRotation(given []string) *rotation {
	made := &rotation{given: map[string]bool{}, live: map[string]int{}, down: map[string]downTime{}}
	for _, one := range given {
		made.given[one] = true
	}
	made.use(schedulers{addresses: given})
	return made
}

// use says what calls try that begin from now on.
func (r *rotation) use(present schedulers) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.schedulers, r.known = present, map[string]bool{}
	for _, one := range present.addresses {
		r.known[one] = true
	}
	for one := range r.down {
		if !r.known[one] {
			delete(r.down, one)
		}
	}
}

// order is the addresses that a call should try: all, up to maxTried. A call that has not begun tries foreign ones where
// all others are down or drain.
func (r *rotation) order(now time.Time, call wanted) []string {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	isDown := func(one string) bool { return r.isDown(one, now) }
	drains := func(one string) bool { return r.entries[one].drains }
	addresses := r.candidates(call.begunWith, func(one string) bool { return !isDown(one) && !drains(one) })
	lacks := func(one string) bool { return !r.entries[one].adapters[call.model] }
	if len(filter(addresses, lacks)) == len(addresses) {
		lacks = func(string) bool { return false }
	}
	var turn []string
	if call.key == nil || len(addresses) == 1 {
		begin := r.next % len(addresses)
		turn = append(append(turn, addresses[begin:]...), addresses[:begin]...)
		r.next = begin + 1
	} else {
		preferred := preference(call.key, addresses)
		takers := filter(preferred, func(one string) bool { return !lacks(one) && !drains(one) })
		if len(takers) == 0 {
			takers = preferred
		}
		first := choice(takers, r.live, func(one string) int { return r.entries[one].load })
		turn = append(turn, first)
		turn = append(turn, filter(preferred, func(one string) bool { return one != first })...)
	}
	sortLast(turn, isDown, drains, lacks)
	turn = r.givenSoon(turn)
	if len(turn) > maxTried {
		turn = turn[:maxTried]
	}
	return turn
}

// candidates are the addresses with a call's model. takes reports whether one takes new calls.
func (r *rotation) candidates(begunWith string, takes func(string) bool) []string {
	if begunWith == "" {
		present := filter(r.addresses, func(one string) bool { return !r.foreign[one] })
		if len(filter(present, takes)) > 0 {
			return present
		}
		return r.addresses
	}
	same := filter(r.addresses, func(one string) bool {
		entry, ok := r.entries[one]
		return !ok || entry.model == begunWith
	})
	if len(same) > 0 {
		return same
	}
	return r.addresses
}

// givenSoon lets at most triedBeforeGiven learned addresses come before a given one.
func (r *rotation) givenSoon(turn []string) []string {
	for place, one := range turn {
		if r.given[one] {
			if place > triedBeforeGiven {
				copy(turn[triedBeforeGiven+1:place+1], turn[triedBeforeGiven:place])
				turn[triedBeforeGiven] = one
			}
			break
		}
	}
	return turn
}

func filter(addresses []string, is func(string) bool) []string {
	found := []string{}
	for _, one := range addresses {
		if is(one) {
			found = append(found, one)
		}
	}
	return found
}

// count is the number of addresses.
func (r *rotation) count() int {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return len(r.addresses)
}

// has reports whether an address is still one of them.
func (r *rotation) has(address string) bool {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.known[address]
}

// isForeign reports whether an address has another model than the present one.
func (r *rotation) isForeign(address string) bool {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.foreign[address]
}

// modelAt is the fingerprint of the model at an address; "": not known.
func (r *rotation) modelAt(address string) string {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.entries[address].model
}

// began counts a call at an address.
func (r *rotation) began(address string) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.live[address]++
}

// ended counts it no more.
func (r *rotation) ended(address string) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if r.live[address]--; r.live[address] == 0 {
		delete(r.live, address)
	}
}

// isUnused reports whether an address is none of them any more and no call is there.
func (r *rotation) isUnused(address string) bool {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return !r.known[address] && r.live[address] == 0
}

// markUp records that an address has answered.
func (r *rotation) markUp(address string) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	delete(r.down, address)
}

// markDown records that an address could not be reached, or takes no requests. While it is down already
// this is ignored, so that concurrent calls count as one failure.
func (r *rotation) markDown(address string, now time.Time) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if r.isDown(address, now) {
		return
	}
	length := 2 * r.down[address].length
	if length < minDown {
		length = minDown
	} else if length > maxDown {
		length = maxDown
	}
	r.down[address] = downTime{until: now.Add(length), length: length}
}

// isDownAt reports whether an address could not be reached a short while ago.
func (r *rotation) isDownAt(address string, now time.Time) bool {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.isDown(address, now)
}

func (r *rotation) isDown(address string, now time.Time) bool {
	return r.down[address].until.After(now)
}

package paceline

import (
	"context"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
)

const (
	// Time for which an address that could not be reached is tried last; doubles with each further failure.
	minDown = 1 * time.Second
	maxDown = 8 * time.Second
	// Wait between two rounds through all addresses; doubles each round, unless a scheduler gives a hint.
	minWait = 100 * time.Millisecond
	maxWait = 1 * time.Second
	// Losses in a row, with nothing received between them, that end a call: the call may be their cause.
	maxLosses = 4
	// Metadata of a call: milliseconds for which it waits at the scheduler while a model is loading.
	waitKey = "paceline-wait-ms"
)

// rotation is the order in which the calls of a client try its addresses. A call with a key begins where that key's
// prompts are cached, unless the client has too many live calls there (AFFINITY in scheduler.proto); one without
// begins with the next address in turn. Those that are down come last. Addresses are indexes. Safe for concurrent use.
type rotation struct {
	addresses []string
	mutex     sync.Mutex
	next      int
	live      []int      // calls, by address
	down      []downTime // by address
}

type downTime struct {
	until  time.Time
	length time.Duration // 0: the address is up
}

func newRotation(addresses []string) *rotation {
	return &rotation{addresses: addresses, live: make([]int, len(addresses)), down: make([]downTime, len(addresses))}
}

// order is all addresses. key: of affinityKey, or nil.
func (r *rotation) order(now time.Time, key []byte) []int {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	up, down := []int{}, []int{}
	for _, address := range r.turn(key) {
		if r.isDown(address, now) {
			down = append(down, address)
		} else {
			up = append(up, address)
		}
	}
	return append(up, down...)
}

func (r *rotation) turn(key []byte) []int {
	if key == nil {
		turn := make([]int, len(r.addresses))
		for i := range turn {
			turn[i] = (r.next + i) % len(turn)
		}
		r.next = (r.next + 1) % len(turn)
		return turn
	}
	order := preference(key, r.addresses)
	turn := []int{choice(order, r.live)}
	for _, address := range order {
		if address != turn[0] {
			turn = append(turn, address)
		}
	}
	return turn
}

// countLive counts a call at an address until the context ends, which must be canceled.
func (r *rotation) countLive(ctx context.Context, address int) {
	add := func(calls int) {
		r.mutex.Lock()
		defer r.mutex.Unlock()
		r.live[address] += calls
	}
	add(1)
	go func() {
		<-ctx.Done()
		add(-1)
	}()
}

// markUp records that an address has answered.
func (r *rotation) markUp(address int) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.down[address] = downTime{}
}

// markDown records that an address could not be reached, or takes no requests. While it is down already
// this is ignored, so that concurrent calls count as one failure.
func (r *rotation) markDown(address int, now time.Time) {
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

func (r *rotation) isDown(address int, now time.Time) bool { return r.down[address].until.After(now) }

// attempts are those of one call; address is the current one's.
//
// A refused attempt (by the scheduler, or because it can't be reached) moves on to the next address; when all
// have refused, the error is the caller's. But if one of them has no executor yet, because a model is loading,
// the call is sent there once more and waits there for up to loadWait: waits says so. A lost attempt (the
// connection broke, or the scheduler ended the call UNAVAILABLE in mid-stream) is repeated at once on each other
// address, then on all of them for up to failoverTimeout.
type attempts struct {
	address         int
	rotation        *rotation
	key             []byte // of affinityKey; nil: in turn
	failoverTimeout time.Duration
	untried         []int
	hasAnswered     bool     // the current attempt has received a message
	refusals        []*Error // in this round through the addresses
	lostAt          time.Time
	losses          int // in a row, since the last message
	wait            time.Duration
	loadWait        time.Duration
	loads           int  // address of a scheduler that had no executor yet; -1: none
	waits           bool // the current attempt waits for its model
}

func newAttempts(r *rotation, now time.Time, failoverTimeout, loadWait time.Duration, key []byte) *attempts {
	order := r.order(now, key)
	return &attempts{
		address: order[0], rotation: r, key: key, failoverTimeout: failoverTimeout, untried: order[1:], wait: minWait,
		loadWait: loadWait, loads: -1,
	}
}

// begin is the context of the current attempt, which counts as live until it is canceled.
func (a *attempts) begin(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	a.rotation.countLive(ctx, a.address)
	if a.waits {
		ctx = metadata.AppendToOutgoingContext(ctx, waitKey, strconv.FormatInt(a.loadWait.Milliseconds(), 10))
	}
	return ctx, cancel
}

// answered records that the current attempt received a message.
func (a *attempts) answered() {
	if !a.hasAnswered {
		a.hasAnswered = true
		a.rotation.markUp(a.address)
	}
}

// failed records that the current attempt failed and moves address on to the next attempt's. It returns the
// time to wait before that attempt, or the error for the caller if there is to be none.
func (a *attempts) failed(failure *Error, now time.Time) (time.Duration, *Error) {
	if failure.Code == codes.Unavailable {
		a.rotation.markDown(a.address, now)
	}
	switch {
	case a.isLost(failure):
		if !a.lose(now) {
			return 0, failure
		}
	case !a.lostAt.IsZero() && failure.Code == codes.AlreadyExists:
		// The lost attempt: its scheduler has not noticed yet that we are gone.
	case failure.Retryable() && !a.hasAnswered:
		a.refusals = append(a.refusals, failure)
		if failure.Reason == "NOT_READY" && a.loads < 0 {
			a.loads = a.address
		}
	default:
		return 0, failure
	}
	a.hasAnswered = false
	if len(a.untried) == 0 {
		return a.nextRound(failure, now)
	}
	a.address, a.untried = a.untried[0], a.untried[1:]
	return 0, nil
}

// isLost reports whether the connection broke, or the scheduler ended, when it may have taken the call.
func (a *attempts) isLost(failure *Error) bool {
	if failure.Code != codes.Unavailable {
		return false
	}
	byGRPC := failure.Reason == "" && failure.RetryAfter == 0
	return a.hasAnswered || byGRPC && !neverReached(failure.Message)
}

// neverReached reports whether an UNAVAILABLE of gRPC's own says that there was no connection to begin with.
func neverReached(message string) bool {
	return strings.Contains(message, "connection error") || strings.Contains(message, "produced zero addresses") ||
		strings.Contains(message, "name resolver error")
}

// lose counts a loss; false: there were too many.
func (a *attempts) lose(now time.Time) bool {
	a.losses++
	if a.hasAnswered {
		a.losses = 1
	}
	if a.losses >= maxLosses {
		return false
	}
	if a.hasAnswered || a.lostAt.IsZero() {
		a.lostAt, a.wait, a.refusals, a.untried = now, minWait, nil, nil
		for _, address := range a.rotation.order(now, a.key) {
			if address != a.address {
				a.untried = append(a.untried, address)
			}
		}
	}
	return true
}

// nextRound begins another round after a loss; without a loss, or without time left, it returns the error.
func (a *attempts) nextRound(failure *Error, now time.Time) (time.Duration, *Error) {
	for i, refusal := range a.refusals {
		if i == 0 || failure.RetryAfter == 0 || refusal.RetryAfter != 0 && refusal.RetryAfter < failure.RetryAfter {
			failure = refusal
		}
	}
	if a.lostAt.IsZero() && a.loads >= 0 && !a.waits && a.loadWait > 0 {
		a.address, a.refusals, a.waits = a.loads, nil, true
		return 0, nil
	}
	left := a.lostAt.Add(a.failoverTimeout).Sub(now)
	if a.lostAt.IsZero() || left <= 0 {
		return 0, failure
	}
	wait := a.wait
	if len(a.refusals) > 0 && failure.RetryAfter != 0 {
		wait = failure.RetryAfter
	}
	if wait < minWait {
		wait = minWait
	}
	if wait > left {
		wait = left
	}
	if a.wait *= 2; a.wait > maxWait {
		a.wait = maxWait
	}
	order := a.rotation.order(now, a.key)
	a.address, a.untried, a.refusals = order[0], order[1:], nil
	return wait, nil
}

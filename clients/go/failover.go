package paceline

import (
	"context"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
)

const (
	// Wait between two rounds through all addresses; doubles each round, unless a scheduler gives a hint.
	minWait = 100 * time.Millisecond
	maxWait = 1 * time.Second
	// Losses in a row, with nothing received between them, that end a call: the call may be their cause.
	maxLosses = 4
	// Metadata of a call: milliseconds for which it waits at the scheduler while a model is loading.
	waitKey = "paceline-wait-ms"
)

// attempts are those of one call; address is the current one's.
//
// A refused attempt (by the scheduler, or because it can't be reached) moves on to the next address; when all
// have refused, the error is the caller's. But if one of them has no executor yet, because a model is loading,
// the call is sent there once more and waits there for up to loadWait: waits says so. A lost attempt (the
// connection broke, or the scheduler ended the call UNAVAILABLE in mid-stream) is repeated at once on each other
// address, then on all of them for up to failoverTimeout.
type attempts struct {
	address         string
	rotation        *rotation
	call            wanted
	failoverTimeout time.Duration
	untried         []string
	hasAnswered     bool     // the current attempt has received a message
	refusals        []*Error // in this round through the addresses
	lostAt          time.Time
	losses          int // in a row, since the last message
	wait            time.Duration
	loadWait        time.Duration
	goneOver        bool   // foreign ones were tried
	loads           string // address of a scheduler that had no executor yet
	waits           bool   // the current attempt waits for its model
}

func newAttempts(r *rotation, now time.Time, failoverTimeout, loadWait time.Duration, call wanted) *attempts {
	made := &attempts{rotation: r, call: call, failoverTimeout: failoverTimeout, wait: minWait, loadWait: loadWait}
	made.try(made.order(now))
	return made
}

// metadata is the context of the current attempt.
func (a *attempts) metadata(ctx context.Context) context.Context {
	if a.waits {
		ctx = metadata.AppendToOutgoingContext(ctx, waitKey, strconv.FormatInt(a.loadWait.Milliseconds(), 10))
	}
	return ctx
}

func (a *attempts) order(now time.Time) []string { return a.rotation.order(now, a.call) }

// try moves on to the first of these addresses, with the others behind it.
func (a *attempts) try(addresses []string) { a.address, a.untried = addresses[0], addresses[1:] }

// skip moves on from an address that is known no more.
func (a *attempts) skip(now time.Time) {
	if a.untried = filter(a.untried, a.rotation.has); len(a.untried) == 0 {
		a.untried = a.order(now)
	}
	a.try(a.untried)
}

// answered records that the current attempt received a message. model is the fingerprint that it tells, "" if it tells
// none.
func (a *attempts) answered(model string) {
	if !a.hasAnswered {
		a.hasAnswered = true
		a.rotation.markUp(a.address)
		if a.call.begunWith = model; model == "" {
			a.call.begunWith = a.rotation.modelAt(a.address)
		}
	}
}

// failed records that the current attempt failed and moves address on to the next attempt's. It returns the
// time to wait before that attempt, or the error for the caller if there is to be none. What a learned scheduler does
// not know or let in, a given one decides.
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
		if failure.Reason == "NOT_READY" && a.loads == "" {
			a.loads = a.address
		}
	case a.isNoLastWord(failure):
		sortLast(a.untried, func(one string) bool { return !a.rotation.given[one] })
	default:
		return 0, failure
	}
	a.hasAnswered = false
	a.untried = filter(a.untried, a.rotation.has)
	if len(a.untried) == 0 && !a.goneOver { // all others are down or drain
		a.goneOver = true
		a.untried = filter(a.order(now), a.rotation.isForeign)
	}
	if len(a.untried) == 0 {
		return a.nextRound(failure, now)
	}
	a.try(a.untried)
	return 0, nil
}

// isNoLastWord reports whether a learned scheduler refused what a given one may take.
func (a *attempts) isNoLastWord(failure *Error) bool {
	if a.rotation.given[a.address] || a.hasAnswered {
		return false
	}
	switch failure.Code {
	case codes.NotFound, codes.Unauthenticated, codes.PermissionDenied, codes.Unimplemented:
		return true
	}
	return false
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
		a.lostAt, a.wait, a.refusals = now, minWait, nil
		a.untried = filter(a.order(now), func(one string) bool { return one != a.address })
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
	if a.lostAt.IsZero() && a.rotation.has(a.loads) && !a.waits && a.loadWait > 0 {
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
	a.try(a.order(now))
	a.refusals = nil
	return wait, nil
}

package paceline

import (
	"context"
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/paceline/paceline/clients/go/schedulerv1"
)

var (
	addresses = []string{"10.0.0.1:50051", "10.0.0.2:50051", "10.0.0.3:50051"}
	start     = time.Unix(1, 0)
	broken    = &Error{Code: codes.Unavailable, Message: "transport is closing"}
	refused   = &Error{Code: codes.Unavailable, Message: "connection error: connection refused"}
)

func TestAnAddressThatIsDownComesLastForAWhileAndLongerEachTime(t *testing.T) {
	rotation := newRotation(addresses[:2])
	firsts := func(now time.Time) map[int]bool {
		found := map[int]bool{}
		for i := 0; i < 4; i++ {
			found[rotation.order(now, nil)[0]] = true
		}
		return found
	}
	expect := func(after time.Duration, want map[int]bool) {
		t.Helper()
		if found := firsts(start.Add(after)); fmt.Sprint(found) != fmt.Sprint(want) {
			t.Fatalf("after %s: %v, not %v", after, found, want)
		}
	}
	rotation.markDown(0, start)
	rotation.markDown(0, start.Add(500*time.Millisecond)) // another call has found out too
	expect(999*time.Millisecond, map[int]bool{1: true})
	expect(time.Second, map[int]bool{0: true, 1: true})
	rotation.markDown(0, start.Add(time.Second))
	expect(2999*time.Millisecond, map[int]bool{1: true})
	rotation.markUp(0)
	expect(2999*time.Millisecond, map[int]bool{0: true, 1: true})
}

func TestWhatAllAddressesRefuseIsTheCallersWithTheSoonestHint(t *testing.T) {
	attempts := newAttempts(newRotation(addresses[:3]), start, time.Minute, 0, nil)
	for _, hint := range []time.Duration{0, 2 * time.Second} {
		full := &Error{Code: codes.ResourceExhausted, Reason: "QUEUE_FULL", RetryAfter: hint}
		if wait, err := attempts.failed(full, start); wait != 0 || err != nil {
			t.Fatal(wait, err)
		}
	}
	last := &Error{Code: codes.ResourceExhausted, Reason: "QUEUE_FULL", RetryAfter: 5 * time.Second}
	if _, err := attempts.failed(last, start); err == nil || err.RetryAfter != 2*time.Second {
		t.Fatal(err)
	}
}

func TestALostCallWaitsForItsSchedulerButNotForEver(t *testing.T) {
	attempts := newAttempts(newRotation(addresses[:1]), start, 10*time.Second, 0, nil)
	now := start
	wait, err := attempts.failed(broken, now)
	for err == nil {
		now = now.Add(wait)
		wait, err = attempts.failed(refused, now)
	}
	if now != start.Add(10*time.Second) || err.Code != codes.Unavailable {
		t.Fatal(now, err)
	}
}

func TestACallThatBreaksItsConnectionEachTimeIsGivenUp(t *testing.T) {
	attempts := newAttempts(newRotation(addresses[:1]), start, time.Minute, 0, nil)
	for i := 1; i < maxLosses; i++ {
		if _, err := attempts.failed(broken, start); err != nil {
			t.Fatal(i, err)
		}
	}
	if _, err := attempts.failed(broken, start); err != broken {
		t.Fatal(err)
	}
}

func TestAStreamThatEndedOtherwiseIsNotSentAgain(t *testing.T) {
	for _, code := range []codes.Code{codes.Aborted, codes.Internal, codes.DeadlineExceeded, codes.ResourceExhausted} {
		attempts := newAttempts(newRotation(addresses[:2]), start, time.Minute, 0, nil)
		attempts.answered()
		failure := &Error{Code: code}
		if _, err := attempts.failed(failure, start); err != failure {
			t.Fatal(code, err)
		}
	}
}

func TestACallRefusedForAModelThatLoadsWaitsThereOnce(t *testing.T) {
	loading := &Error{Code: codes.Unavailable, Reason: "NOT_READY", RetryAfter: time.Second}
	full := &Error{Code: codes.ResourceExhausted, Reason: "QUEUE_FULL"}
	attempts := newAttempts(newRotation(addresses[:2]), start, time.Minute, 5*time.Second, nil)
	if _, err := attempts.failed(loading, start); err != nil || attempts.waits {
		t.Fatalf("the second address is not asked first: %v", err)
	}
	if wait, err := attempts.failed(full, start); err != nil || wait != 0 || !attempts.waits || attempts.address != 0 {
		t.Fatalf("the call does not wait at the scheduler that is loading: %v, address %d", err, attempts.address)
	}
	ctx, cancel := attempts.begin(context.Background())
	defer cancel()
	sent, _ := metadata.FromOutgoingContext(ctx)
	if got := sent.Get(waitKey); len(got) != 1 || got[0] != "5000" {
		t.Fatalf("metadata %v", sent)
	}
	if _, err := attempts.failed(loading, start); err != loading {
		t.Fatalf("it waits twice: %v", err)
	}
}

func TestACallsKeyDecidesWhereItBeginsUnlessTooManyOfTheClientsCallsAreThere(t *testing.T) {
	key := affinityKey(&schedulerv1.GenerateRequest{Prompt: Text("hello")}, "") // its order: 2 3 1
	rotation := newRotation(addresses)
	if order := fmt.Sprint(rotation.order(start, key), rotation.order(start, key)); order != "[1 2 0] [1 2 0]" {
		t.Fatal(order)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	rotation.countLive(ctx, 1) // of 2 calls with the next one: at most 1 each
	if order := fmt.Sprint(rotation.order(start, key)); order != "[2 1 0]" {
		t.Fatal(order)
	}
	rotation.markDown(2, start)
	if order := fmt.Sprint(rotation.order(start, key)); order != "[1 0 2]" {
		t.Fatal(order)
	}
}

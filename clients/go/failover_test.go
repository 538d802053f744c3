package paceline

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
)

var (
	addresses = []string{"10.0.0.1:50051", "10.0.0.2:50051", "10.0.0.3:50051"}
	start     = time.Unix(1, 0)
	broken    = &Error{Code: codes.Unavailable, Message: "transport is closing"}
	refused   = &Error{Code: codes.Unavailable, Message: "connection error: connection refused"}
)

func TestWhatAllAddressesRefuseIsTheCallersWithTheSoonestHint(t *testing.T) {
	attempts := newAttempts(newRotation(addresses[:3]), start, time.Minute, 0, wanted{})
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
	attempts := newAttempts(newRotation(addresses[:1]), start, 10*time.Second, 0, wanted{})
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
	attempts := newAttempts(newRotation(addresses[:1]), start, time.Minute, 0, wanted{})
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
		attempts := newAttempts(newRotation(addresses[:2]), start, time.Minute, 0, wanted{})
		attempts.answered("")
		failure := &Error{Code: code}
		if _, err := attempts.failed(failure, start); err != failure {
			t.Fatal(code, err)
		}
	}
}

func TestACallRefusedForAModelThatLoadsWaitsThereOnce(t *testing.T) {
	loading := &Error{Code: codes.Unavailable, Reason: "NOT_READY", RetryAfter: time.Second}
	full := &Error{Code: codes.ResourceExhausted, Reason: "QUEUE_FULL"}
	attempts := newAttempts(newRotation(addresses[:2]), start, time.Minute, 5*time.Second, wanted{})
	if _, err := attempts.failed(loading, start); err != nil || attempts.waits {
		t.Fatalf("the second address is not asked first: %v", err)
	}
	if wait, err := attempts.failed(full, start); err != nil || wait != 0 || !attempts.waits || attempts.address != addresses[0] {
		t.Fatalf("the call does not wait at the scheduler that is loading: %v, address %s", err, attempts.address)
	}
	sent, _ := metadata.FromOutgoingContext(attempts.metadata(context.Background()))
	if got := sent.Get(waitKey); len(got) != 1 || got[0] != "5000" {
		t.Fatalf("metadata %v", sent)
	}
	if _, err := attempts.failed(loading, start); err != loading {
		t.Fatalf("it waits twice: %v", err)
	}
}

func TestWhatALearnedSchedulerDoesNotKnowOrLetInAGivenOneDecides(t *testing.T) {
	for _, code := range []codes.Code{
		codes.NotFound, codes.Unauthenticated, codes.PermissionDenied, codes.Unimplemented,
	} {
		rotation := newRotation(addresses[:1])
		rotation.use(schedulers{addresses: addresses})
		refusal := &Error{Code: code}
		attempts := newAttempts(rotation, start, time.Minute, 0, wanted{})
		for attempts.address == addresses[0] {
			attempts = newAttempts(rotation, start, time.Minute, 0, wanted{})
		}
		if _, err := attempts.failed(refusal, start); err != nil || attempts.address != addresses[0] {
			t.Fatal(code, err, attempts.address)
		}
		if _, err := attempts.failed(refusal, start); err != refusal {
			t.Fatal(code, err)
		}
	}
}

func TestAnAttemptAtAnAddressThatIsKnownNoMoreMovesOn(t *testing.T) {
	rotation := newRotation(addresses[:1])
	rotation.use(schedulers{addresses: addresses})
	attempts := newAttempts(rotation, start, time.Minute, 0, wanted{})
	rotation.use(schedulers{addresses: addresses[:1]})
	for i := 0; i < 3; i++ {
		if attempts.skip(start); attempts.address != addresses[0] {
			t.Fatal(attempts.address)
		}
	}
}

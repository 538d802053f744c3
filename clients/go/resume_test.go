package paceline

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/paceline/paceline/clients/go/schedulerv1"
)

const seed = 1<<64 - 7 // not exact as a float64

// replies is what a scheduler that generates six tokens for each completion answers to a request.
func replies(request *schedulerv1.GenerateRequest) []*schedulerv1.GenerateResponse {
	received := map[uint32]*schedulerv1.ContinuedCompletion{}
	started := &schedulerv1.Started{
		Sampling: request.Sampling, MaxTokens: 6, PromptDigest: []byte("digest"), CachedTokens: 5,
		AdapterFingerprint: []byte("adapter"), PromptTokens: 4,
	}
	if request.Continuation != nil {
		if string(request.Continuation.AdapterFingerprint) != "adapter" {
			return nil
		}
		started.CachedTokens = 0
		for _, one := range request.Continuation.Completions {
			received[one.Index] = one
			started.ContinuedTokens += uint32(len(one.TokenIds))
		}
	}
	found := []*schedulerv1.GenerateResponse{{Event: &schedulerv1.GenerateResponse_Started{Started: started}}}
	if request.PromptLogprobs != nil && started.ContinuedTokens == 0 {
		for first := uint32(1); first < started.PromptTokens; first += 2 {
			part := &schedulerv1.PromptLogprobs{First: first}
			for position := first; position < first+2 && position < started.PromptTokens; position++ {
				part.Logprobs = append(part.Logprobs, &schedulerv1.TokenLogprobs{Logprob: -float32(position)})
			}
			found = append(found, &schedulerv1.GenerateResponse{
				Event: &schedulerv1.GenerateResponse_PromptLogprobs{PromptLogprobs: part},
			})
		}
	}
	for token := 0; token <= 6; token++ {
		for index := uint32(0); index < request.N; index++ {
			before := received[index]
			if before.GetFinished() || token < len(before.GetTokenIds()) {
				continue
			}
			next := &schedulerv1.GenerateResponse{Index: index}
			if token < 6 {
				text := fmt.Sprintf("é%d", token)
				if token == len(before.GetTokenIds()) && int(before.GetTextBytes()) != 3*token {
					text = "the text goes on at another place"
				}
				next.Event = &schedulerv1.GenerateResponse_Delta{Delta: &schedulerv1.Delta{
					TokenIds: []uint32{idOf(request, index, token)}, Text: text, ElapsedUs: 1000,
				}}
			} else {
				usage := &schedulerv1.Usage{CompletionTokens: 6, CachedTokens: started.CachedTokens, TotalMs: 7}
				next.Event = &schedulerv1.GenerateResponse_Finished{Finished: &schedulerv1.Finished{Usage: usage}}
			}
			found = append(found, next)
		}
	}
	return found
}

func idOf(request *schedulerv1.GenerateRequest, index uint32, token int) uint32 {
	return uint32(request.Sampling.GetSeed()%1000) + 100*index + uint32(token)
}

// read reads a stream whose attempts are cut after so many messages each, and the last one is not.
func read(t *testing.T, n uint32, cuts ...int) []*schedulerv1.Completion {
	request := &schedulerv1.GenerateRequest{
		N: n, Sampling: &schedulerv1.SamplingParams{Seed: proto.Uint64(seed)}, PromptLogprobs: proto.Uint32(0),
	}
	stream := newResumable(identified(request))
	collector := NewCollector()
	now := time.Unix(1, 0)
	for attempt := 0; !stream.isComplete(); attempt++ {
		request, err := stream.attempt(now)
		if err != nil {
			t.Fatal(err)
		}
		messages := replies(request)
		if attempt < len(cuts) && cuts[attempt] < len(messages) {
			messages = messages[:cuts[attempt]]
		}
		for _, message := range messages {
			wanted, err := stream.see(message)
			if err != nil {
				t.Fatal(err)
			}
			if wanted {
				collector.Add(message)
			}
		}
		now = now.Add(time.Second)
	}
	if err := stream.checkEnd(); err != nil {
		t.Fatal(err)
	}
	found := []float32{}
	for _, one := range stream.promptLogprobs {
		found = append(found, one.Logprob)
	}
	if fmt.Sprint(found) != "[-1 -2 -3]" {
		t.Fatalf("cut after %v: the prompt's logprobs are %v", cuts, found)
	}
	return collector.Completions()
}

func TestEveryTwoCutsOfAStreamContinueItExactly(t *testing.T) {
	for _, n := range []uint32{1, 3} {
		undisturbed := read(t, n)
		for first := 0; first < 24; first++ {
			for second := 0; second < 24; second++ {
				found := read(t, n, first, second)
				for index, one := range found {
					whole := undisturbed[index]
					if one.Text != whole.Text || fmt.Sprint(one.TokenIds) != fmt.Sprint(whole.TokenIds) {
						t.Fatalf("cut after %d and %d: %v, not %v", first, second, one, whole)
					}
					if cached := one.Finished.Usage.CachedTokens; cached != 5 {
						t.Fatalf("cut after %d and %d: %d cached tokens", first, second, cached)
					}
				}
			}
		}
	}
}

func TestTimesCountFromTheFirstAttempt(t *testing.T) {
	usage := read(t, 1, 5)[0].Finished.Usage
	if usage.TotalMs != 1007 || usage.FirstTokenMs != 1 {
		t.Fatal(usage)
	}
}

func begun(t *testing.T) *resumable {
	stream := newResumable(identified(&schedulerv1.GenerateRequest{N: 1}))
	request, err := stream.attempt(time.Unix(1, 0))
	if err != nil {
		t.Fatal(err)
	}
	for _, message := range replies(request)[:3] {
		if _, err := stream.see(message); err != nil {
			t.Fatal(err)
		}
	}
	return stream
}

func TestASchedulerThatIgnoresTheContinuationEndsTheStream(t *testing.T) {
	for _, taken := range []uint32{0, 1} {
		stream := begun(t)
		if _, err := stream.attempt(time.Unix(2, 0)); err != nil {
			t.Fatal(err)
		}
		started := &schedulerv1.Started{ContinuedTokens: taken}
		_, err := stream.see(&schedulerv1.GenerateResponse{
			Event: &schedulerv1.GenerateResponse_Started{Started: started},
		})
		var failure *Error
		if !errors.As(err, &failure) || !failure.Lost || failure.Retryable() {
			t.Fatal(taken, err)
		}
	}
}

func TestAnEventBeforeAllLogprobsOfThePromptIsAnError(t *testing.T) {
	stream := newResumable(identified(&schedulerv1.GenerateRequest{N: 1, PromptLogprobs: proto.Uint32(0)}))
	request, err := stream.attempt(time.Unix(1, 0))
	if err != nil {
		t.Fatal(err)
	}
	for i, message := range replies(request) {
		if i == 2 {
			continue // one of two parts
		}
		if _, err = stream.see(message); err != nil {
			break
		}
	}
	var failure *Error
	if !errors.As(err, &failure) || failure.Code != codes.DataLoss {
		t.Fatal(err)
	}
}

func TestAContinuationThatIsRefusedForItsModelKeepsTheCode(t *testing.T) {
	for _, code := range []codes.Code{codes.FailedPrecondition, codes.NotFound} {
		stream := begun(t)
		refusal := &Error{Code: code, Reason: "MODEL_NOT_FOUND"}
		if found := stream.finalError(refusal, "a:1"); found != refusal {
			t.Fatal(found) // of the caller's own request
		}
		if _, err := stream.attempt(time.Unix(2, 0)); err != nil {
			t.Fatal(err)
		}
		found := stream.finalError(refusal, "a:1")
		if found == refusal || found.Code != code || found.Lost || found.Reason != refusal.Reason {
			t.Fatal(found)
		}
	}
}

func TestAStreamThatEndsTooEarlyIsAnError(t *testing.T) {
	var failure *Error
	if err := begun(t).checkEnd(); !errors.As(err, &failure) || failure.Code != codes.DataLoss {
		t.Fatal(err)
	}
}

func TestARefusalAfterEventsIsNoInvitationToSendTheRequestAgain(t *testing.T) {
	refusal := &Error{Code: codes.Unavailable, Reason: "DRAINING", RetryAfter: time.Second}
	if found := begun(t).finalError(refusal, "a:1"); !found.Lost || found.Retryable() || found.Reason != "DRAINING" {
		t.Fatal(found)
	}
	fresh := newResumable(identified(&schedulerv1.GenerateRequest{}))
	if found := fresh.finalError(refusal, "a:1"); found != refusal {
		t.Fatal(found)
	}
}

func TestNilIsAnEmptyRequestThatTheSchedulerRefuses(t *testing.T) {
	request := identified(nil)
	if request.RequestId == "" || request.Sampling.Seed == nil || request.Prompt != nil {
		t.Fatalf("%v", request)
	}
	if copied[schedulerv1.ScoreRequest](nil) == nil {
		t.Fatal("nil")
	}
}

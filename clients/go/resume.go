package paceline

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"sort"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/paceline/paceline/clients/go/schedulerv1"
)

// identified is a copy of the request, with an id and a seed drawn if it has none: sent again, it is the same
// request.
func identified(request *schedulerv1.GenerateRequest) *schedulerv1.GenerateRequest {
	request = copied(request)
	request.RequestId = idOr(request.RequestId)
	if request.Sampling == nil {
		request.Sampling = &schedulerv1.SamplingParams{}
	}
	if request.Sampling.Seed == nil {
		request.Sampling.Seed = proto.Uint64(binary.BigEndian.Uint64(drawn(8)))
	}
	return request
}

// copied is a copy of a request; of nil, an empty one.
func copied[M any, Request interface {
	*M
	proto.Message
}](request Request) Request {
	made := Request(new(M))
	if request != nil {
		proto.Merge(made, request)
	}
	return made
}

// idOr is the given id, or one drawn if it is "".
func idOr(given string) string {
	if given != "" {
		return given
	}
	return hex.EncodeToString(drawn(16))
}

func drawn(bytes int) []byte {
	found := make([]byte, bytes)
	if _, err := rand.Read(found); err != nil {
		panic(err) // the system has no randomness
	}
	return found
}

// received is the part of one completion that was received so far.
type received struct {
	continued *schedulerv1.ContinuedCompletion
	textBytes int    // of text, reasoning and tool calls
	firstMs   uint32 // from the request's arrival to its first tokens
	hasFirst  bool
}

// maxFruitless are the attempts in a row that were begun and brought no token, after which the request is not sent again.
const maxFruitless = 8

// resumable joins the attempts of one Generate call into one stream.
//
// For each attempt, send the request that attempt() returns, then pass each message to see(); when the attempt
// is lost, begin another. The events of all attempts together are those of a stream that was never
// interrupted. Times in usage count from the first attempt on, and cached_tokens is its; preemptions, drafts
// and queue_ms are the last attempt's, for a scheduler reports them only with the end.
type resumable struct {
	request        *schedulerv1.GenerateRequest
	completions    uint32
	received       map[uint32]*received // by index: what has had anything
	finished       uint32               // completions
	beganAt        time.Time            // when the attempt was sent that brought the first event
	sentAt         time.Time
	offsetMs       uint32               // from beganAt to the current attempt
	first          *schedulerv1.Started // of the attempt that brought the first event
	promptLogprobs []*schedulerv1.TokenLogprobs
	attemptStarted bool // the current attempt brought a Started
	continued      int  // tokens in the current attempt's continuation; -1: it has none
	bounds         bounds
	fruitless      int // attempts in a row that began and brought no token
}

// newResumable takes a request that has an id and a seed, and keeps it.
func newResumable(request *schedulerv1.GenerateRequest) *resumable {
	if request.Returns == schedulerv1.Returns_RETURNS_TEXT {
		request.Returns = schedulerv1.Returns_RETURNS_BOTH // a continuation needs the token ids
	}
	completions := request.N
	if completions == 0 {
		completions = 1
	}
	return &resumable{
		request: request, completions: completions, received: make(map[uint32]*received), continued: -1,
		bounds: boundsOf(request, nil),
	}
}

func (r *resumable) hasBegun() bool { return !r.beganAt.IsZero() }

// isComplete reports whether all completions have finished: then nothing is missing, whatever the status.
func (r *resumable) isComplete() bool { return r.finished == r.completions }

// attempt is the request to send now: the caller's, or its continuation.
func (r *resumable) attempt(now time.Time) (*schedulerv1.GenerateRequest, error) {
	tokens := 0
	for _, one := range r.received {
		tokens += len(one.continued.TokenIds)
	}
	if tokens > 0 && tokens != r.continued {
		r.fruitless = 0
	} else if r.attemptStarted {
		r.fruitless++
	}
	if r.fruitless >= maxFruitless {
		return nil, r.lost(fmt.Sprintf("%d attempts in a row brought no token", maxFruitless))
	}
	r.attemptStarted, r.sentAt = false, now
	if !r.hasBegun() {
		r.first, r.promptLogprobs = nil, nil
		return r.request, nil
	}
	if r.first == nil {
		return nil, r.lost("its scheduler is too old to say how")
	}
	r.offsetMs = uint32(now.Sub(r.beganAt).Milliseconds())
	request := proto.Clone(r.request).(*schedulerv1.GenerateRequest)
	request.Sampling = r.first.Sampling
	if request.Stop == nil {
		request.Stop = &schedulerv1.StopConditions{}
	}
	request.Stop.MaxTokens = proto.Uint32(r.first.MaxTokens)
	request.Continuation = &schedulerv1.Continuation{
		PromptDigest: r.first.PromptDigest, ModelFingerprint: r.first.ModelFingerprint, Sampler: r.first.Sampler,
		AdapterFingerprint: r.first.AdapterFingerprint,
	}
	r.continued = 0
	indexes := make([]int, 0, len(r.received))
	for index := range r.received {
		indexes = append(indexes, int(index))
	}
	sort.Ints(indexes)
	for _, index := range indexes {
		one := r.received[uint32(index)]
		r.continued += len(one.continued.TokenIds)
		request.Continuation.Completions = append(request.Continuation.Completions, one.continued)
	}
	return request, nil
}

// see takes the next message of the attempt; true: it is an event for the caller.
func (r *resumable) see(message *schedulerv1.GenerateResponse) (bool, error) {
	if started := message.GetStarted(); started != nil {
		return false, r.seeStarted(started)
	}
	if part := message.GetPromptLogprobs(); part != nil {
		return false, r.seePromptLogprobs(part)
	}
	delta, finished := message.GetDelta(), message.GetFinished()
	if delta == nil && finished == nil {
		return false, nil // of a later revision
	}
	if r.continued >= 0 && !r.attemptStarted {
		return false, r.ignored(0)
	}
	one := r.received[message.Index]
	if message.Index >= r.completions || one != nil && one.continued.Finished {
		return false, incomplete("an event of completion %d, which has finished or was not asked for", message.Index)
	}
	if one == nil {
		one = &received{continued: &schedulerv1.ContinuedCompletion{Index: message.Index}}
		r.received[message.Index] = one
	}
	if !r.hasBegun() {
		if err := r.checkPromptLogprobs(); err != nil {
			return false, err
		}
		r.beganAt = r.sentAt
	}
	if finished != nil {
		r.finished++
		one.continued.Finished = true
		r.join(finished.Usage, one)
		return true, nil
	}
	if err := one.add(delta, r.offsetMs); err != nil {
		return false, err
	}
	return true, r.bounds.check(delta, len(one.continued.TokenIds), one.textBytes)
}

// checkEnd is called when an attempt has ended OK.
func (r *resumable) checkEnd() error {
	if !r.isComplete() {
		return incomplete("the stream ended when %d of %d completions had finished", r.finished, r.completions)
	}
	return nil
}

// finalError is the error for the caller when the last attempt, at this address, ended with failure.
func (r *resumable) finalError(failure *Error, address string) *Error {
	// Of another prompt, model or sampler; or without the adapter.
	mismatch := r.continued >= 0 && (failure.Code == codes.FailedPrecondition || failure.Code == codes.NotFound)
	if !r.hasBegun() || !(failure.Retryable() || failure.Code == codes.AlreadyExists || mismatch) {
		return failure
	}
	lost := r.lost(fmt.Sprintf("%s (%s)", failure.Message, address))
	lost.Reason, lost.Metadata, lost.cause = failure.Reason, failure.Metadata, failure
	if mismatch {
		lost.Code, lost.Lost = failure.Code, false
	}
	return lost
}

func (r *resumable) seeStarted(started *schedulerv1.Started) error {
	if r.attemptStarted {
		return incomplete("the scheduler began the stream twice")
	}
	r.attemptStarted = true
	if r.first == nil {
		r.first, r.bounds = started, boundsOf(r.request, started)
	}
	if r.continued >= 0 && int(started.ContinuedTokens) != r.continued {
		return r.ignored(started.ContinuedTokens)
	}
	return nil
}

func (r *resumable) seePromptLogprobs(part *schedulerv1.PromptLogprobs) error {
	if r.hasBegun() || r.request.PromptLogprobs == nil {
		return nil // a continuation without tokens repeats them
	}
	if int64(part.First) != int64(1+len(r.promptLogprobs)) {
		return incomplete("logprobs of the prompt from token %d on, behind %d", part.First, len(r.promptLogprobs))
	}
	r.promptLogprobs = append(r.promptLogprobs, part.Logprobs...)
	if len(r.promptLogprobs) > 0 && len(r.promptLogprobs) >= int(r.first.GetPromptTokens()) {
		return incomplete("more logprobs of the prompt came than it has tokens")
	}
	return checkNumbers(part.Logprobs)
}

// checkPromptLogprobs is called before the first event, which comes after all of them.
func (r *resumable) checkPromptLogprobs() error {
	if r.first == nil || r.request.PromptLogprobs == nil {
		return nil
	}
	if found, wanted := len(r.promptLogprobs), int(r.first.PromptTokens)-1; found != wanted {
		return incomplete("%d logprobs of the prompt came before the first token, not %d", found, wanted)
	}
	return nil
}

func (r *resumable) ignored(tokens uint32) *Error {
	return r.lost(fmt.Sprintf("the scheduler took over %d of %d tokens received (0: it knows no continuations)",
		tokens, r.continued))
}

func (r *resumable) lost(why string) *Error {
	text := "the stream was interrupted, and could not be continued: " + why
	return &Error{Code: codes.Unavailable, Message: text, Lost: true}
}

// join turns the usage of the last attempt into that of the whole stream.
func (r *resumable) join(usage *schedulerv1.Usage, one *received) {
	if r.continued < 0 || usage == nil {
		return
	}
	usage.CachedTokens = r.first.CachedTokens
	usage.TotalMs += r.offsetMs
	usage.FirstTokenMs += r.offsetMs
	if one.hasFirst && one.firstMs < usage.FirstTokenMs {
		usage.FirstTokenMs = one.firstMs
	}
}

func (one *received) add(delta *schedulerv1.Delta, offsetMs uint32) error {
	continued := one.continued
	continued.TokenIds = append(continued.TokenIds, delta.TokenIds...)
	continued.TextBytes += uint32(len(delta.Text))
	continued.ReasoningBytes += uint32(len(delta.Reasoning))
	one.textBytes += len(delta.Text) + len(delta.Reasoning)
	for _, call := range delta.ToolCalls {
		begun := len(continued.ArgumentBytes)
		if int(call.Index) > begun || (call.Name != "") != (int(call.Index) == begun) {
			return incomplete("tool call %d does not begin with its name, and once", call.Index)
		}
		if int(call.Index) == begun {
			continued.ArgumentBytes = append(continued.ArgumentBytes, 0)
		}
		continued.ArgumentBytes[call.Index] += uint32(len(call.Arguments))
		one.textBytes += len(call.Id) + len(call.Name) + len(call.Arguments)
	}
	delta.ElapsedUs += 1000 * uint64(offsetMs)
	if !one.hasFirst {
		one.hasFirst, one.firstMs = true, uint32(delta.ElapsedUs/1000)
	}
	return nil
}

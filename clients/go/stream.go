package paceline

import (
	"context"
	"io"
	"time"

	"github.com/paceline/paceline/clients/go/schedulerv1"
)

// endTimeout is the wait for a stream's end when all completions have finished.
const endTimeout = time.Second

// Stream is one Generate call, over as many schedulers as it takes. Cancel its context, or Close it, to leave:
// the scheduler computes nothing for it from the next step on. Not safe for concurrent use.
type Stream struct {
	client    *Client
	ctx       context.Context
	cancel    context.CancelFunc
	attempts  *attempts
	resumable *resumable
	call      schedulerv1.SchedulerService_GenerateClient
	leave     context.CancelFunc // ends the current attempt, if one was begun
	err       error              // why no more events come
}

// RequestID is the request's, drawn if the caller gave none: Abort takes it.
func (s *Stream) RequestID() string { return s.resumable.request.RequestId }

// Started is the request with its defaults filled in; nil before the first event.
func (s *Stream) Started() *schedulerv1.Started { return s.resumable.first }

// PromptLogprobs are those of the prompt's tokens but the first, if the request asks for them; complete with the
// first event.
func (s *Stream) PromptLogprobs() []*schedulerv1.TokenLogprobs { return s.resumable.promptLogprobs }

// Recv returns the next event, which has a Delta or a Finished; io.EOF when all completions have finished; or
// an *Error.
func (s *Stream) Recv() (*schedulerv1.GenerateResponse, error) {
	for s.err == nil {
		message, err := s.next()
		switch {
		case err == nil:
			s.attempts.answered(string(message.GetStarted().GetModelFingerprint()))
			wanted, err := s.resumable.see(message)
			if err != nil {
				s.end(err)
			} else if wanted {
				return message, nil
			}
		case err == io.EOF:
			if err := s.resumable.checkEnd(); err != nil {
				s.end(err)
			} else {
				s.end(io.EOF)
			}
		case s.resumable.isComplete():
			s.end(io.EOF) // the connection broke after the last event
		default:
			s.failed(fromRPC(s.ctx, err))
		}
	}
	return nil, s.err
}

// Close cancels what is left of the stream.
func (s *Stream) Close() { s.cancel() }

// next is the next message of the current attempt, which it begins if there is none.
func (s *Stream) next() (*schedulerv1.GenerateResponse, error) {
	if s.call == nil {
		request, err := s.resumable.attempt(time.Now())
		if err != nil {
			return nil, err
		}
		scheduler, attempt, cancel, err := s.client.connections.begin(s.ctx, s.attempts)
		if err != nil {
			return nil, err
		}
		s.leave = cancel
		s.call, err = scheduler.Generate(attempt, request)
		if err != nil {
			s.call = nil
			return nil, err
		}
	}
	if s.resumable.isComplete() {
		defer time.AfterFunc(endTimeout, s.leave).Stop() // nothing is missing but the end
	}
	message, err := s.call.Recv()
	if err == nil {
		err = s.client.connections.checkStarted(s.attempts.address, message)
	}
	return message, err
}

func (s *Stream) failed(failure *Error) {
	s.call = nil
	s.leave()
	address := s.attempts.address
	if err := s.client.again(s.ctx, s.attempts, failure); err != nil {
		s.end(s.resumable.finalError(err, address))
	}
}

func (s *Stream) end(err error) {
	s.err = err
	s.cancel()
}

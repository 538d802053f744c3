// Package paceline is the client of Paceline's schedulers: a language model behind gRPC, as streams of tokens.
//
//	client, err := paceline.NewClient([]string{"127.0.0.1:50051"})
//	...
//	stream := client.Generate(ctx, &schedulerv1.GenerateRequest{
//		Prompt: paceline.Chat(paceline.User("Why is the sky blue?")),
//	})
//	defer stream.Close()
//	for {
//		event, err := stream.Recv()
//		if err == io.EOF {
//			break
//		}
//		...
//		fmt.Print(event.GetDelta().GetText())
//	}
//
// Requests and events are the messages of scheduler.proto, in package schedulerv1; its comments list ranges,
// defaults and errors.
package paceline

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/paceline/paceline/clients/go/schedulerv1"
)

// Client calls one scheduler, or several that serve the same model. Calls are spread over them, requests with the same
// beginning to the same one (WithAffinityKey), and those that one refuses are tried on the others. A stream whose
// scheduler dies goes on exactly on another one, or on the same one after its restart. Where the schedulers have a
// directory, the client learns of others with the same model, and uses them too (WithDirectory). Safe for concurrent use.
type Client struct {
	connections     *connections
	failoverTimeout time.Duration
}

// NewClient is a client of the schedulers at these addresses, each host:port. It connects with the first call.
func NewClient(addresses []string, options ...Option) (*Client, error) {
	chosen := settings{failoverTimeout: DefaultFailoverTimeout, directory: DirectorySafe}
	for _, option := range options {
		option(&chosen)
	}
	switch chosen.directory {
	case DirectoryOff, DirectorySafe, DirectoryAny:
	default:
		return nil, fmt.Errorf("paceline: the directory's use is %q, not off, safe or any", chosen.directory)
	}
	if chosen.tls != nil && chosen.tls.RootCAs == nil {
		chosen.directory = DirectoryOff // any public certificate would do
	}
	seen := map[string]bool{}
	given := filter(addresses, func(one string) bool {
		isNew := !seen[one]
		seen[one] = true
		return isNew
	})
	if len(given) == 0 {
		return nil, errors.New("paceline: no address is given")
	}
	connections, err := newConnections(given, chosen)
	if err != nil {
		return nil, err
	}
	return &Client{connections: connections, failoverTimeout: chosen.failoverTimeout}, nil
}

// Close closes the connections; calls under way end.
func (c *Client) Close() error { return c.connections.close() }

// Addresses are those of the schedulers that are used now: the given ones, then those learned from a directory.
func (c *Client) Addresses() []string { return c.connections.known.present().addresses }

// Generate is a stream of events; its first Recv sends the request. The deadline of the context is the request's,
// which the scheduler honours too.
func (c *Client) Generate(ctx context.Context, request *schedulerv1.GenerateRequest) *Stream {
	ctx, cancel := context.WithCancel(ctx)
	call := wanted{key: c.affinity(ctx, request), model: request.GetModel()}
	return &Stream{
		client: c, ctx: ctx, cancel: cancel, leave: func() {},
		attempts:  c.attempts(c.failoverTimeout, call),
		resumable: newResumable(identified(request)),
	}
}

// Complete generates, and waits until all completions have finished. One per index.
func (c *Client) Complete(ctx context.Context, request *schedulerv1.GenerateRequest) ([]*schedulerv1.Completion, error) {
	request = identified(request)
	attempts := c.attempts(c.failoverTimeout, wanted{key: c.affinity(ctx, request), model: request.GetModel()})
	reply, err := callOn(ctx, c, attempts, schedulerv1.SchedulerServiceClient.GenerateUnary,
		&schedulerv1.GenerateUnaryRequest{Request: request})
	if err != nil {
		return nil, err
	}
	n := int(request.N)
	if n == 0 {
		n = 1
	}
	if len(reply.Completions) != n {
		return nil, incomplete("the reply has %d completions, not %d", len(reply.Completions), n)
	}
	for index, one := range reply.Completions {
		if int(one.Index) != index || one.Finished == nil {
			return nil, incomplete("the reply has completion %d unfinished", index)
		}
	}
	return reply.Completions, nil
}

// affinity is the request's key among several schedulers.
func (c *Client) affinity(ctx context.Context, request *schedulerv1.GenerateRequest) []byte {
	if c.connections.rotation.count() == 1 {
		return nil
	}
	own, _ := ctx.Value(affinityKeyOf{}).(string)
	return affinityKey(request, own)
}

// Tokenize is the token ids of a text or of messages, as Generate would use them.
func (c *Client) Tokenize(ctx context.Context, request *schedulerv1.TokenizeRequest) ([]uint32, error) {
	reply, err := call(ctx, c, 0, schedulerv1.SchedulerServiceClient.Tokenize, request)
	return reply.GetTokenIds(), err
}

// Detokenize is the text of token ids.
func (c *Client) Detokenize(ctx context.Context, tokenIDs []uint32) (string, error) {
	request := &schedulerv1.DetokenizeRequest{TokenIds: tokenIDs}
	reply, err := call(ctx, c, 0, schedulerv1.SchedulerServiceClient.Detokenize, request)
	return reply.GetText(), err
}

// ModelInfo is the model and the limits of a request.
func (c *Client) ModelInfo(ctx context.Context) (*schedulerv1.GetModelInfoResponse, error) {
	request := &schedulerv1.GetModelInfoRequest{}
	return call(ctx, c, 0, schedulerv1.SchedulerServiceClient.GetModelInfo, request)
}

// Status is the live counters of one scheduler that answers.
func (c *Client) Status(ctx context.Context) (*schedulerv1.GetStatusResponse, error) {
	request := &schedulerv1.GetStatusRequest{}
	return call(ctx, c, 0, schedulerv1.SchedulerServiceClient.GetStatus, request)
}

// Abort ends live requests of this identity, on all schedulers, and returns the ids of those that it ended.
// Unknown ids are no error; that no scheduler answered is one.
func (c *Client) Abort(ctx context.Context, requestIDs ...string) ([]string, error) {
	c.connections.lookFirst(ctx)
	attempt, cancel := context.WithCancel(ctx)
	defer cancel()
	all, err := c.connections.all(attempt)
	if err != nil {
		return nil, fromRPC(ctx, err)
	}
	replies, failures := make([]*schedulerv1.AbortResponse, len(all)), make([]error, len(all))
	var calls sync.WaitGroup
	for i, one := range all {
		calls.Add(1)
		go func(i int, scheduler schedulerv1.SchedulerServiceClient) {
			defer calls.Done()
			replies[i], failures[i] = scheduler.Abort(attempt, &schedulerv1.AbortRequest{RequestIds: requestIDs})
		}(i, one)
	}
	calls.Wait()
	var aborted []string
	answers := 0
	for i, reply := range replies {
		if failures[i] == nil {
			answers++
			aborted = append(aborted, reply.Aborted...)
		}
	}
	if answers == 0 {
		return nil, fromRPC(ctx, failures[0])
	}
	return aborted, nil
}

// method is a unary RPC of the stub.
type method[Request, Reply any] func(
	schedulerv1.SchedulerServiceClient, context.Context, Request, ...grpc.CallOption,
) (Reply, error)

// call sends a unary call, on as many schedulers as it takes.
func call[Request, Reply any](
	ctx context.Context, c *Client, failoverTimeout time.Duration, send method[Request, Reply], request Request,
) (none Reply, _ error) {
	call := wanted{}
	if named, ok := any(request).(interface{ GetModel() string }); ok {
		call.model = named.GetModel()
	}
	return callOn(ctx, c, c.attempts(failoverTimeout, call), send, request)
}

// attempts are those of a call that begins now.
func (c *Client) attempts(failoverTimeout time.Duration, call wanted) *attempts {
	c.connections.lookInTime()
	return newAttempts(c.connections.rotation, time.Now(), failoverTimeout, c.failoverTimeout, call)
}

func callOn[Request, Reply any](
	ctx context.Context, c *Client, attempts *attempts, send method[Request, Reply], request Request,
) (reply Reply, _ error) {
	var none Reply
	for {
		scheduler, attempt, cancel, err := c.connections.begin(ctx, attempts)
		if err == nil {
			if err = c.connections.check(attempt, attempts.address, scheduler); err == nil {
				reply, err = send(scheduler, attempt, request)
			}
			cancel()
		}
		if err == nil {
			attempts.answered("")
			return reply, nil
		}
		if failure := c.again(ctx, attempts, fromRPC(ctx, err)); failure != nil {
			return none, failure
		}
	}
}

// again waits until the next attempt after a failed one; it returns the error for the caller if there is none.
func (c *Client) again(ctx context.Context, attempts *attempts, failure *Error) *Error {
	wait, final := attempts.failed(failure, time.Now())
	if final != nil {
		return final
	}
	if c.connections.isClosed() {
		return failure
	}
	if wait == 0 {
		return nil
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return fromRPC(ctx, ctx.Err())
	}
}

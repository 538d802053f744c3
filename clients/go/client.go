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
	"crypto/tls"
	"errors"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"

	"github.com/paceline/paceline/clients/go/schedulerv1"
)

const (
	// DefaultFailoverTimeout is the time after the loss of a call's scheduler in which the call is sent again.
	DefaultFailoverTimeout = 30 * time.Second

	maxMessageBytes = 4 << 20
	connectTimeout  = 3 * time.Second // a frozen scheduler accepts connections and sends nothing
)

// Client calls one scheduler, or several that serve the same model. Calls are spread over them, requests with the same
// beginning to the same one (WithAffinityKey), and those that one refuses are tried on the others. A stream whose scheduler dies goes on exactly on another one, or on the
// same one after its restart. Safe for concurrent use.
type Client struct {
	addresses       []string
	connections     []*grpc.ClientConn
	schedulers      []schedulerv1.SchedulerServiceClient
	rotation        *rotation
	failoverTimeout time.Duration
	closed          int32 // atomic; 1: Close was called
}

// Option is an option of NewClient.
type Option func(*settings)

type settings struct {
	token           string
	tls             *tls.Config
	failoverTimeout time.Duration
	dial            []grpc.DialOption
}

// WithToken sends `authorization: Bearer TOKEN` with every call; "" sends none.
func WithToken(token string) Option { return func(s *settings) { s.token = token } }

// WithTLS encrypts the connections. Without it they are plaintext, which a scheduler accepts on loopback only.
func WithTLS(config *tls.Config) Option { return func(s *settings) { s.tls = config } }

// WithFailoverTimeout replaces DefaultFailoverTimeout; 0: a call that was lost is tried once on each other address.
func WithFailoverTimeout(timeout time.Duration) Option {
	return func(s *settings) { s.failoverTimeout = timeout }
}

// WithDialOptions adds options of gRPC, such as interceptors; they override the client's own.
func WithDialOptions(options ...grpc.DialOption) Option {
	return func(s *settings) { s.dial = append(s.dial, options...) }
}

// NewClient is a client of the schedulers at these addresses, each host:port. It connects with the first call.
func NewClient(addresses []string, options ...Option) (*Client, error) {
	if len(addresses) == 0 {
		return nil, errors.New("paceline: no address is given")
	}
	chosen := settings{failoverTimeout: DefaultFailoverTimeout}
	for _, option := range options {
		option(&chosen)
	}
	client := &Client{
		addresses:       append([]string{}, addresses...),
		rotation:        newRotation(addresses),
		failoverTimeout: chosen.failoverTimeout,
	}
	for _, address := range addresses {
		connection, err := grpc.Dial(address, chosen.dialOptions()...)
		if err != nil {
			client.Close()
			return nil, err
		}
		client.connections = append(client.connections, connection)
		client.schedulers = append(client.schedulers, schedulerv1.NewSchedulerServiceClient(connection))
	}
	return client, nil
}

// Close closes the connections; calls under way end.
func (c *Client) Close() error {
	atomic.StoreInt32(&c.closed, 1)
	var failure error
	for _, connection := range c.connections {
		if err := connection.Close(); err != nil && failure == nil {
			failure = err
		}
	}
	return failure
}

// Generate is a stream of events; its first Recv sends the request. The deadline of the context is the request's,
// which the scheduler honours too.
func (c *Client) Generate(ctx context.Context, request *schedulerv1.GenerateRequest) *Stream {
	ctx, cancel := context.WithCancel(ctx)
	return &Stream{
		client: c, ctx: ctx, cancel: cancel,
		attempts:  newAttempts(c.rotation, time.Now(), c.failoverTimeout, c.failoverTimeout, c.affinity(ctx, request)),
		resumable: newResumable(identified(request)),
	}
}

// Complete generates, and waits until all completions have finished. One per index.
func (c *Client) Complete(ctx context.Context, request *schedulerv1.GenerateRequest) ([]*schedulerv1.Completion, error) {
	request = identified(request)
	attempts := newAttempts(c.rotation, time.Now(), c.failoverTimeout, c.failoverTimeout, c.affinity(ctx, request))
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
	if len(c.addresses) == 1 {
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
	var aborted []string
	var failure error
	answers := 0
	for _, scheduler := range c.schedulers {
		reply, err := scheduler.Abort(ctx, &schedulerv1.AbortRequest{RequestIds: requestIDs})
		if err != nil {
			failure = fromRPC(ctx, err)
			continue
		}
		answers++
		aborted = append(aborted, reply.Aborted...)
	}
	if answers == 0 {
		return nil, failure
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
	attempts := newAttempts(c.rotation, time.Now(), failoverTimeout, c.failoverTimeout, nil)
	return callOn(ctx, c, attempts, send, request)
}

func callOn[Request, Reply any](
	ctx context.Context, c *Client, attempts *attempts, send method[Request, Reply], request Request,
) (none Reply, _ error) {
	for {
		attempt, cancel := attempts.begin(ctx)
		reply, err := send(c.schedulers[attempts.address], attempt, request)
		cancel()
		if err == nil {
			attempts.answered()
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
	if atomic.LoadInt32(&c.closed) == 1 {
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

func (s *settings) dialOptions() []grpc.DialOption {
	options := []grpc.DialOption{
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(maxMessageBytes), grpc.MaxCallSendMsgSize(maxMessageBytes),
		),
		// A frozen scheduler keeps its sockets open. gRPC for Go pings every 10 s at most.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 1500 * time.Millisecond}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 500 * time.Millisecond,
			},
			MinConnectTimeout: connectTimeout,
		}),
		grpc.WithUserAgent("paceline-go"),
	}
	if s.tls != nil {
		options = append(options, grpc.WithTransportCredentials(credentials.NewTLS(s.tls)))
	} else {
		options = append(options, grpc.WithInsecure())
	}
	if s.token != "" {
		// Plain metadata instead of gRPC's call credentials, which refuse plaintext: a token is useful on
		// loopback too.
		options = append(options,
			grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, request, reply interface{},
				connection *grpc.ClientConn, next grpc.UnaryInvoker, options ...grpc.CallOption) error {
				return next(s.authorized(ctx), method, request, reply, connection, options...)
			}),
			grpc.WithChainStreamInterceptor(func(ctx context.Context, description *grpc.StreamDesc,
				connection *grpc.ClientConn, method string, next grpc.Streamer, options ...grpc.CallOption,
			) (grpc.ClientStream, error) {
				return next(s.authorized(ctx), description, connection, method, options...)
			}))
	}
	return append(options, s.dial...)
}

func (s *settings) authorized(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+s.token)
}

package paceline

import (
	"context"
	"crypto/tls"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
)

const (
	// DefaultFailoverTimeout is the time after the loss of a call's scheduler in which the call is sent again.
	DefaultFailoverTimeout = 30 * time.Second

	maxMessageBytes = 4 << 20
	connectTimeout  = 3 * time.Second // a frozen scheduler accepts connections and sends nothing
)

// Option is an option of NewClient.
type Option func(*settings)

type settings struct {
	token           string
	tls             *tls.Config
	failoverTimeout time.Duration
	directory       DirectoryUse
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

// WithDirectory says which of those schedulers the client uses too that the given ones list in their directory: of the
// same model, and with DirectorySafe, the default, over TLS, by the authorities in RootCAs of WithTLS and under the name
// that the directory has for each, or on loopback; with DirectoryAny without TLS elsewhere too, if the client has none;
// with DirectoryOff none. A client with TLS and without RootCAs uses none: any public certificate would do for it.
func WithDirectory(use DirectoryUse) Option { return func(s *settings) { s.directory = use } }

// WithDialOptions adds options of gRPC, such as interceptors; they override the client's own.
func WithDialOptions(options ...grpc.DialOption) Option {
	return func(s *settings) { s.dial = append(s.dial, options...) }
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

// learnedOptions are those of a connection to an address of a directory, whose certificate has this name. Nothing that
// the caller set turns off its check.
func (s *settings) learnedOptions(tlsName string) []grpc.DialOption {
	options := s.dialOptions()
	if s.tls != nil {
		config := s.tls.Clone()
		config.ServerName, config.InsecureSkipVerify = tlsName, false
		options = append(options, grpc.WithTransportCredentials(credentials.NewTLS(config)))
	}
	return options
}

func (s *settings) authorized(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+s.token)
}

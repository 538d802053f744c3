package paceline

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/paceline/paceline/clients/go/schedulerv1"
)

const patience = 20 * time.Second

// whole is the text of each completion that a fake generates.
const whole = "é0é1é2é3é4é5"

// fake is a scheduler with a directory, which generates as replies does.
type fake struct {
	schedulerv1.UnimplementedSchedulerServiceServer
	model     string                                                         // its fingerprint
	text      string                                                         // instead of each delta's own
	hangAfter int                                                            // so many messages of a stream; 0: never
	live      string                                                         // the id of a request that Abort ends
	answer    func(schedulerv1.SchedulerService_WatchSchedulersServer) error // instead of the directory

	mutex    sync.Mutex
	others   []*schedulerv1.SchedulerEntry
	looks    int
	infos    int
	requests []*schedulerv1.GenerateRequest
	callers  map[string]bool // what calls had as authorization
}

// serve serves a fake until the test ends, or stop is called.
func serve(t *testing.T, served *fake, options ...grpc.ServerOption) (address string, stop func()) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served.callers = map[string]bool{}
	if served.model == "" {
		served.model = "print"
	}
	server := grpc.NewServer(options...)
	schedulerv1.RegisterSchedulerServiceServer(server, served)
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	return listener.Addr().String(), server.Stop
}

func (f *fake) called(ctx context.Context) {
	sent, _ := metadata.FromIncomingContext(ctx)
	for _, one := range append(sent.Get("authorization"), "")[:1] {
		f.callers[one] = true
	}
}

// seen is what a test counts while the fake serves.
func (f *fake) seen() (looks, infos int, requests []*schedulerv1.GenerateRequest) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	return f.looks, f.infos, f.requests
}

func (f *fake) list(entries ...*schedulerv1.SchedulerEntry) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	f.others = entries
}

func (f *fake) messages(ctx context.Context, request *schedulerv1.GenerateRequest) []*schedulerv1.GenerateResponse {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	f.called(ctx)
	f.requests = append(f.requests, request)
	found := replies(request)
	for _, message := range found {
		if started := message.GetStarted(); started != nil {
			started.ModelFingerprint = []byte(f.model)
		}
		if delta := message.GetDelta(); delta != nil && f.text != "" {
			delta.Text = f.text
		}
	}
	return found
}

func (f *fake) Generate(
	request *schedulerv1.GenerateRequest, stream schedulerv1.SchedulerService_GenerateServer,
) error {
	for number, message := range f.messages(stream.Context(), request) {
		if number == f.hangAfter && number > 0 {
			<-stream.Context().Done()
		}
		if err := stream.Send(message); err != nil {
			return err
		}
	}
	return nil
}

func (f *fake) GenerateUnary(
	ctx context.Context, request *schedulerv1.GenerateUnaryRequest,
) (*schedulerv1.GenerateUnaryResponse, error) {
	collector := NewCollector()
	for _, message := range f.messages(ctx, request.Request) {
		if message.GetStarted() == nil {
			collector.Add(message)
		}
	}
	return &schedulerv1.GenerateUnaryResponse{Completions: collector.Completions()}, nil
}

func (f *fake) GetModelInfo(
	ctx context.Context, _ *schedulerv1.GetModelInfoRequest,
) (*schedulerv1.GetModelInfoResponse, error) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	f.called(ctx)
	f.infos++
	return &schedulerv1.GetModelInfoResponse{ModelFingerprint: []byte(f.model)}, nil
}

func (f *fake) WatchSchedulers(
	_ *schedulerv1.WatchSchedulersRequest, stream schedulerv1.SchedulerService_WatchSchedulersServer,
) error {
	f.mutex.Lock()
	f.called(stream.Context())
	f.looks++
	others := f.others
	f.mutex.Unlock()
	if f.answer != nil {
		return f.answer(stream)
	}
	own := entryOf("own:1", "")
	own.WrittenBy, own.ModelFingerprint = "", []byte(f.model)
	for _, message := range []*schedulerv1.WatchSchedulersResponse{
		{Entries: []*schedulerv1.SchedulerEntry{own}}, {Entries: others, Complete: true},
	} {
		if err := stream.Send(message); err != nil {
			return err
		}
	}
	<-stream.Context().Done()
	return nil
}

func (f *fake) Abort(_ context.Context, request *schedulerv1.AbortRequest) (*schedulerv1.AbortResponse, error) {
	found := &schedulerv1.AbortResponse{}
	for _, id := range request.RequestIds {
		if id == f.live {
			found.Aborted = append(found.Aborted, id)
		}
	}
	return found, nil
}

// hasNoDirectory is the answer of a scheduler without one.
func hasNoDirectory(schedulerv1.SchedulerService_WatchSchedulersServer) error {
	return status.Error(codes.Unimplemented, "no directory")
}

func entryOf(address, tlsName string) *schedulerv1.SchedulerEntry {
	return &schedulerv1.SchedulerEntry{
		Address: address, TlsName: tlsName, Model: "m", ModelFingerprint: []byte("print"), Instance: "of " + address,
		WrittenBy: "somebody",
	}
}

func clientOf(t *testing.T, address string, options ...Option) *Client {
	client, err := NewClient([]string{address}, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

// knowing is a client that has looked into the directory at the address, which lists so many others.
func knowing(t *testing.T, address string, others int, options ...Option) *Client {
	client := clientOf(t, address, options...)
	client.connections.lookInTime()
	<-client.connections.lastLook
	if found := client.Addresses(); len(found) != 1+others {
		t.Fatal(found)
	}
	return client
}

func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("waited in vain until ", what)
		}
	}
}

func prompt() *schedulerv1.GenerateRequest {
	return &schedulerv1.GenerateRequest{
		Prompt: Text("hello"), N: 1, Sampling: &schedulerv1.SamplingParams{Seed: proto.Uint64(seed)},
	}
}

// callWith is a call whose key is this number, as a stream or not; its text.
func callWith(t *testing.T, client *Client, number string, unary bool) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(WithAffinityKey(context.Background(), number), patience)
	defer cancel()
	var found []*schedulerv1.Completion
	var err error
	if unary {
		found, err = client.Complete(ctx, prompt())
	} else {
		found, err = client.Generate(ctx, prompt()).Collect()
	}
	if err != nil {
		t.Fatal(err)
	}
	return found[0].Text
}

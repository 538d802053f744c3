package paceline

import (
	"context"
	"crypto/tls"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/paceline/paceline/clients/go/schedulerv1"
)

func TestAStreamGoesOnAtASchedulerThatTheDeadOneKnew(t *testing.T) {
	given, other := &fake{hangAfter: 4}, &fake{}
	second, _ := serve(t, other)
	given.list(entryOf(second, ""))
	address, stop := serve(t, given)
	client := clientOf(t, address)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	stream := client.Generate(ctx, prompt())
	defer stream.Close()
	collector := NewCollector()
	for i := 0; i < 3; i++ {
		event, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		collector.Add(event)
	}
	until(t, "the other is known", func() bool { return len(client.Addresses()) == 2 })
	stop()
	found, err := stream.Collect()
	if err != nil {
		t.Fatal(err)
	}
	if text := collector.Completions()[0].Text + found[0].Text; text != whole {
		t.Fatal(text)
	}
	if _, _, requests := other.seen(); len(requests) != 1 || requests[0].Continuation == nil {
		t.Fatal(requests)
	}
}

func TestCallsAreSpreadOverLearnedOnesWhichAreAskedForTheirModelOnce(t *testing.T) {
	given, other := &fake{}, &fake{}
	second, _ := serve(t, other)
	given.list(entryOf(second, ""))
	address, _ := serve(t, given)
	for _, unary := range []bool{true, false} {
		client := knowing(t, address, 1)
		for i := 0; i < 24; i++ {
			if text := callWith(t, client, fmt.Sprint(i), unary); text != whole {
				t.Fatal(text)
			}
		}
	}
	_, infos, requests := given.seen()
	_, otherInfos, otherRequests := other.seen()
	if infos != 0 || otherInfos != 1 || len(requests) == 0 || len(otherRequests) == 0 ||
		len(requests)+len(otherRequests) != 48 {
		t.Fatal(infos, otherInfos, len(requests), len(otherRequests))
	}
}

func TestAbortAsksThoseOfTheDirectoryTooWhichIsLookedIntoBefore(t *testing.T) {
	given, other := &fake{}, &fake{live: "there"}
	second, _ := serve(t, other)
	given.list(entryOf(second, ""), entryOf("127.0.0.1:1", ""))
	address, _ := serve(t, given)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	aborted, err := clientOf(t, address).Abort(ctx, "there", "nowhere")
	if err != nil || fmt.Sprint(aborted) != "[there]" {
		t.Fatal(aborted, err)
	}
}

func TestWithoutTheDirectoryNothingIsAskedOrLearned(t *testing.T) {
	given := &fake{}
	given.list(entryOf("127.0.0.1:1", ""))
	address, _ := serve(t, given)
	client := clientOf(t, address, WithDirectory(DirectoryOff))
	callWith(t, client, "", true)
	if _, err := client.Abort(context.Background(), "x"); err != nil {
		t.Fatal(err)
	}
	if looks, _, _ := given.seen(); looks != 0 || len(client.Addresses()) != 1 {
		t.Fatal(looks, client.Addresses())
	}
}

func TestTheDirectorysUseIsOneOfThreeAndNeedsAnAuthorityWithTLS(t *testing.T) {
	for _, use := range []DirectoryUse{DirectoryOff, DirectorySafe, DirectoryAny} {
		clientOf(t, "127.0.0.1:1", WithDirectory(use))
	}
	if _, err := NewClient([]string{"127.0.0.1:1"}, WithDirectory("all")); err == nil {
		t.Fatal("no error")
	}
	client := clientOf(t, "127.0.0.1:1", WithTLS(&tls.Config{}), WithDirectory(DirectoryAny))
	if client.connections.known.isTimeToLook(start, "") {
		t.Fatal("any public certificate would do")
	}
}

func TestASchedulerWithoutADirectoryIsAskedOnce(t *testing.T) {
	given := &fake{answer: hasNoDirectory}
	address, _ := serve(t, given)
	client := clientOf(t, address)
	for i := 0; i < 3; i++ {
		if text := callWith(t, client, "", i == 0); text != whole {
			t.Fatal(text)
		}
		until(t, "the look has ended", client.connections.known.hasLooked)
	}
	if looks, _, _ := given.seen(); looks != 1 || len(client.Addresses()) != 1 {
		t.Fatal(looks, client.Addresses())
	}
	if client.connections.known.isTimeToLook(time.Now().Add(noDirectory/2), "") {
		t.Fatal("it is asked again soon")
	}
}

func TestAClientThatReadsALongStreamLooksMeanwhile(t *testing.T) {
	given := &fake{}
	address, _ := serve(t, given)
	client := clientOf(t, address)
	stream := client.Generate(context.Background(), prompt())
	for i := 1; i < 4; i++ {
		if _, err := stream.Recv(); err != nil {
			t.Fatal(err)
		}
		until(t, "it looks", func() bool { looks, _, _ := given.seen(); return looks == i })
		<-client.connections.lastLook
		client.connections.known.mutex.Lock()
		client.connections.known.nextLook = time.Time{}
		client.connections.known.mutex.Unlock()
	}
	stream.Close()
}

func TestADirectoryThatNeverEndsTakesNoCallAlongAndEndsItself(t *testing.T) {
	ended := make(chan int)
	given := &fake{answer: func(stream schedulerv1.SchedulerService_WatchSchedulersServer) error {
		own := entryOf("own:1", "")
		own.WrittenBy = ""
		message := &schedulerv1.WatchSchedulersResponse{Entries: []*schedulerv1.SchedulerEntry{own}}
		for i := 0; ; i++ {
			if err := stream.Send(message); err != nil {
				ended <- i
				return err
			}
			message.Entries = []*schedulerv1.SchedulerEntry{entryOf(fmt.Sprintf("127.0.0.1:%d", 2+i%60_000), "")}
		}
	}}
	address, _ := serve(t, given)
	client := clientOf(t, address)
	if text := callWith(t, client, "", false); text != whole {
		t.Fatal(text)
	}
	<-client.connections.lastLook
	if sent := <-ended; sent > 20_000 { // 256 are read, and some more are on their way
		t.Fatal(sent)
	}
	callWith(t, client, "", true)
	if looks, _, _ := given.seen(); looks != 1 || len(client.Addresses()) != 1 {
		t.Fatal(looks, client.Addresses())
	}
}

func TestTheConnectionToOneThatIsKnownNoMoreIsClosedAfterItsLastCall(t *testing.T) {
	given, other := &fake{}, &fake{hangAfter: 3}
	second, _ := serve(t, other)
	given.list(entryOf(second, ""))
	address, _ := serve(t, given)
	client := knowing(t, address, 1)
	open := func() int {
		client.connections.mutex.Lock()
		defer client.connections.mutex.Unlock()
		return len(client.connections.open)
	}
	if open() != 1 {
		t.Fatal("opened before its first use")
	}
	var stream *Stream
	for i := 0; ; i++ {
		stream = client.Generate(WithAffinityKey(context.Background(), fmt.Sprint(i)), prompt())
		if stream.attempts.address == second {
			break
		}
		stream.Close()
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	given.list()
	client.connections.look()
	if _, err := stream.Recv(); err != nil || len(client.Addresses()) != 1 || open() != 2 {
		t.Fatal(err, client.Addresses(), open())
	}
	stream.Close()
	until(t, "it is closed", func() bool { return open() == 1 })
}

func TestCloseEndsALookAndLeavesNoGoroutine(t *testing.T) {
	before := runtime.NumGoroutine()
	asked, left := make(chan struct{}), make(chan struct{})
	silent := &fake{answer: func(stream schedulerv1.SchedulerService_WatchSchedulersServer) error {
		close(asked)
		<-stream.Context().Done()
		close(left)
		return nil
	}}
	address, stopSilent := serve(t, silent)
	client := clientOf(t, address)
	callWith(t, client, "", false)
	<-asked
	began := time.Now()
	client.Close()
	<-client.connections.lastLook
	<-left
	if took := time.Since(began); took > lookTimeout/2 {
		t.Fatal(took)
	}
	if _, err := client.Complete(context.Background(), prompt()); err == nil {
		t.Fatal("a closed client calls")
	}
	given, other := &fake{}, &fake{}
	second, stopOther := serve(t, other)
	given.list(entryOf(second, ""))
	address, stop := serve(t, given)
	client = knowing(t, address, 1)
	for i := 0; i < 8; i++ {
		callWith(t, client, fmt.Sprint(i), i%2 == 0)
	}
	client.Close()
	for _, stop := range []func(){stop, stopOther, stopSilent} {
		stop()
	}
	until(t, "all goroutines have ended", func() bool { return runtime.NumGoroutine() <= before })
}

func TestACallToOneThatWasJustGivenUpGoesElsewhereAndDoesNotHang(t *testing.T) {
	given, other := "127.0.0.1:1", "127.0.0.1:2"
	c, err := newConnections([]string{given}, settings{directory: DirectorySafe})
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	own := entryOf(given, "")
	own.WrittenBy, own.ModelFingerprint = "", []byte("old")
	learned := entryOf(other, "")
	learned.Model, learned.ModelFingerprint = own.Model, []byte("new")
	c.known.saw(given, []*schedulerv1.SchedulerEntry{own, learned}, time.Now())
	c.useKnown()
	attempts := newAttempts(c.rotation, time.Now(), time.Minute, 0, wanted{})
	attempts.answered("new")
	attempts.address = other
	c.known.distrust(other) // and nobody has told the rotation yet
	begun := make(chan string)
	go func() {
		_, _, cancel, _ := c.begin(context.Background(), attempts)
		cancel()
		begun <- attempts.address
	}()
	select {
	case address := <-begun:
		if address != given {
			t.Fatal(address)
		}
	case <-time.After(patience):
		t.Fatal("it hangs")
	}
}

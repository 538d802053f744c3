package paceline

import (
	"fmt"
	"reflect"
	"testing"
	"time"

	"github.com/paceline/paceline/clients/go/schedulerv1"
)

// firsts are the addresses with which calls begin.
func firsts(rotation *rotation, now time.Time, calls ...wanted) map[string]bool {
	found := map[string]bool{}
	for _, call := range calls {
		found[rotation.order(now, call)[0]] = true
	}
	return found
}

// keyed are calls with many keys.
func keyed(model string) []wanted {
	calls := []wanted{}
	for i := 0; i < 20; i++ {
		calls = append(calls, wanted{key: []byte(fmt.Sprint(i)), model: model})
	}
	return calls
}

func TestAnAddressThatIsDownComesLastForAWhileAndLongerEachTime(t *testing.T) {
	rotation := newRotation(addresses[:2])
	expect := func(after time.Duration, want ...string) {
		t.Helper()
		found := firsts(rotation, start.Add(after), make([]wanted, 4)...)
		if !reflect.DeepEqual(found, set(want...)) {
			t.Fatalf("after %s: %v, not %v", after, found, want)
		}
	}
	rotation.markDown(addresses[0], start)
	rotation.markDown(addresses[0], start.Add(500*time.Millisecond)) // another call has found out too
	expect(999*time.Millisecond, addresses[1])
	expect(time.Second, addresses[:2]...)
	rotation.markDown(addresses[0], start.Add(time.Second))
	expect(2999*time.Millisecond, addresses[1])
	rotation.markUp(addresses[0])
	expect(2999*time.Millisecond, addresses[:2]...)
}

func TestACallsKeyDecidesWhereItBeginsUnlessTooManyOfTheClientsCallsAreThere(t *testing.T) {
	key := affinityKey(&schedulerv1.GenerateRequest{Prompt: Text("hello")}, "") // its order: 2 3 1
	rotation := newRotation(addresses)
	expect := func(want ...int) {
		t.Helper()
		found := rotation.order(start, wanted{key: key})
		for place, number := range want {
			if found[place] != addresses[number-1] {
				t.Fatal(found, want)
			}
		}
	}
	expect(2, 3, 1)
	expect(2, 3, 1)
	rotation.began(addresses[1]) // of 2 calls with the next one: at most 1 each
	expect(3, 2, 1)
	rotation.markDown(addresses[2], start)
	expect(2, 1, 3)
}

func TestCallsGoByTheLoadThatTheDirectoryTellsAndLastToThoseThatDrain(t *testing.T) {
	rotation := newRotation([]string{"a:1"})
	rotation.use(schedulers{
		addresses: []string{"a:1", "b:1", "c:1"},
		entries:   map[string]learned{"b:1": {load: 3}, "c:1": {drains: true}},
	})
	for i := 0; i < 3; i++ {
		if order := rotation.order(start, wanted{}); order[2] != "c:1" {
			t.Fatal(order)
		}
	}
	if found := firsts(rotation, start, keyed("")...); !reflect.DeepEqual(found, set("a:1")) {
		t.Fatal(found) // b has more than its share
	}
	rotation.began("b:1")
	rotation.use(schedulers{addresses: []string{"a:1"}})
	if rotation.isUnused("b:1") {
		t.Fatal("a call is there")
	}
	rotation.ended("b:1")
	if !rotation.isUnused("b:1") || rotation.isUnused("a:1") {
		t.Fatal("no call is there")
	}
}

func TestWhoClaimsThatNobodyIsThereGetsNoMoreThanAShareOfTheClientsCalls(t *testing.T) {
	rotation := newRotation([]string{"a:1"})
	rotation.use(schedulers{
		addresses: []string{"a:1", "liar:1"}, entries: map[string]learned{"a:1": {load: 1000}, "liar:1": {}},
	})
	counts := map[string]int{}
	for _, call := range keyed("") {
		address := rotation.order(start, call)[0]
		rotation.began(address)
		counts[address]++
	}
	if counts["liar:1"] > 13 {
		t.Fatal(counts)
	}
}

func TestThoseWithTheAdapterComeFirst(t *testing.T) {
	rotation := newRotation([]string{"a:1"})
	rotation.use(schedulers{
		addresses: []string{"a:1", "b:1"},
		entries:   map[string]learned{"a:1": {load: 3}, "b:1": {adapters: set("poet")}},
	})
	if found := firsts(rotation, start, append(keyed("poet"), wanted{model: "poet"})...); !reflect.DeepEqual(found, set("b:1")) {
		t.Fatal(found)
	}
	if found := firsts(rotation, start, make([]wanted, 2)...); len(found) != 2 {
		t.Fatal(found)
	}
}

func TestAFewLearnedAddressesAreTriedBeforeAGivenOneAndNotAllOfThousands(t *testing.T) {
	all := []string{"given:1"}
	for i := 0; i < 1000; i++ {
		all = append(all, fmt.Sprintf("learned:%d", i))
	}
	rotation := newRotation(all[:1])
	rotation.use(schedulers{addresses: all})
	for _, call := range append(keyed(""), make([]wanted, 100)...) {
		order := rotation.order(start, call)
		place := 0
		for order[place] != "given:1" {
			place++
		}
		if len(order) != maxTried || place > triedBeforeGiven || len(set(order...)) != maxTried {
			t.Fatal(len(order), place)
		}
	}
}

func TestAnotherModelGetsNewCallsOnceThePresentOneTakesNoneAndNoStreamThatBegan(t *testing.T) {
	rotation := newRotation([]string{"given:1"})
	rotation.use(schedulers{
		addresses: []string{"given:1", "old:1", "new:1"},
		entries:   map[string]learned{"given:1": {model: "old"}, "old:1": {model: "old"}, "new:1": {model: "new"}},
		foreign:   set("new:1"),
	})
	drains := &Error{Code: 14, Reason: "DRAINING", RetryAfter: time.Second}
	begin := func() *attempts { return newAttempts(rotation, start, time.Minute, 0, wanted{key: []byte("k")}) }
	if found := firsts(rotation, start, keyed("")...); found["new:1"] || len(found) != 2 {
		t.Fatal(found)
	}
	stream, call := begin(), begin()
	stream.answered("")
	for i, want := range []bool{false, true} {
		if _, err := call.failed(drains, start); err != nil || (call.address == "new:1") != want {
			t.Fatal(i, call.address, err)
		}
	}
	if again := begin(); again.address != "new:1" {
		t.Fatal(again.address) // at once, as long as the others take none
	}
	for i := 0; i < 3; i++ {
		if _, err := stream.failed(broken, start); err != nil || stream.address == "new:1" {
			t.Fatal(i, stream.address, err)
		}
	}
}

func TestAStreamThatBeganBeforeTheFirstLookGoesOnByItsModelAlone(t *testing.T) {
	rotation := newRotation([]string{"given:1"})
	stream := newAttempts(rotation, start, time.Minute, 0, wanted{})
	stream.answered("old")
	rotation.use(schedulers{
		addresses: []string{"given:1", "new:1", "old:1"},
		entries:   map[string]learned{"given:1": {model: "old"}, "new:1": {model: "new"}, "old:1": {model: "old"}},
		foreign:   set("new:1"),
	})
	for i := 0; i < 3; i++ {
		if _, err := stream.failed(broken, start); err != nil || stream.address == "new:1" {
			t.Fatal(i, stream.address, err)
		}
	}
}

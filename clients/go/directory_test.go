package paceline

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"testing"
	"time"

	"github.com/paceline/paceline/clients/go/schedulerv1"
)

// directoryCases is relative to the folder in which tests run, symbolic links resolved.
const directoryCases = "../../tests/scenario/directory.json"

// turns are as many looks as there are schedulers that are asked in turn, and more.
const turns = 6

type directoryCase struct {
	Name  string
	Given []string
	TLS   bool
	Use   DirectoryUse
	Steps []json.RawMessage
}

// directoryStep has what steps say beside their first key.
type directoryStep struct {
	AtS         float64 `json:"at_s"`
	Entries     []toldEntry
	Ports       []int
	Fingerprint string
	Down        []string
	Caller      string
	Is          bool
}

type toldEntry struct {
	Address     string
	Own         bool
	Model       *string
	Fingerprint *string
	Instance    *string
	TLSName     string `json:"tls_name"`
	State       string
	Running     uint32
	Waiting     uint32
	Adapters    []string
}

func (e *toldEntry) entry() *schedulerv1.SchedulerEntry {
	or := func(told *string, other string) string {
		if told == nil {
			return other
		}
		return *told
	}
	found := &schedulerv1.SchedulerEntry{
		Address: e.Address, TlsName: e.TLSName, Model: or(e.Model, "m"),
		ModelFingerprint: []byte(or(e.Fingerprint, "print")), Instance: or(e.Instance, "of "+e.Address),
		WrittenBy: "somebody", State: schedulerv1.SchedulerState_SCHEDULER_STATE_SERVING, Adapters: e.Adapters,
		Load: &schedulerv1.SchedulerLoad{Running: e.Running, Waiting: e.Waiting},
	}
	if e.Own {
		found.WrittenBy = ""
	}
	if e.State != "" {
		found.State = schedulerv1.SchedulerState(schedulerv1.SchedulerState_value["SCHEDULER_STATE_"+e.State])
	}
	return found
}

func TestEachStepOfADirectorysCaseIsAsItSays(t *testing.T) {
	text, err := os.ReadFile(directoryCases)
	if err != nil {
		t.Fatal(err)
	}
	var cases []directoryCase
	if err := json.Unmarshal(text, &cases); err != nil || len(cases) == 0 {
		t.Fatal(len(cases), err)
	}
	for _, one := range cases {
		t.Run(one.Name, func(t *testing.T) {
			known := newKnownSchedulers(one.Given, one.TLS, one.Use)
			for _, step := range one.Steps {
				found, expected := play(t, known, step)
				if !reflect.DeepEqual(found, expected) {
					t.Fatalf("%s: %v, not %v", step, found, expected)
				}
			}
		})
	}
}

// play is what a step finds and what it expects; nil for one that only tells something.
func play(t *testing.T, known *knownSchedulers, text json.RawMessage) (found, expected interface{}) {
	var step directoryStep
	var values map[string]json.RawMessage
	unmarshal(t, text, &step)
	unmarshal(t, text, &values)
	kind := firstKey(t, text)
	seconds := func(since float64) time.Time { return start.Add(time.Duration(since * float64(time.Second))) }
	value, at := values[kind], seconds(step.AtS)
	present := known.present()
	switch kind {
	case "saw":
		entries := []*schedulerv1.SchedulerEntry{}
		for _, one := range step.Entries {
			entries = append(entries, one.entry())
		}
		if len(step.Ports) == 2 {
			for port := step.Ports[0]; port < step.Ports[1]; port++ {
				one := toldEntry{Address: fmt.Sprintf("127.0.0.1:%d", port)}
				entries = append(entries, one.entry())
			}
		}
		known.saw(name(t, value), entries, at)
	case "lost":
		known.lost(name(t, value), at)
	case "has_none":
		known.hasNone(name(t, value), at)
	case "refused":
		known.refused(name(t, value), at)
	case "distrust":
		known.distrust(name(t, value))
	case "addresses":
		return set(present.addresses...), names(t, value)
	case "draining":
		drain := []string{}
		for address, one := range present.entries {
			if one.drains {
				drain = append(drain, address)
			}
		}
		return set(drain...), names(t, value)
	case "foreign":
		return present.foreign, names(t, value)
	case "count":
		count := 0
		unmarshal(t, value, &count)
		return len(present.addresses), count
	case "loads":
		loads, want := map[string]int{}, map[string]int{}
		unmarshal(t, value, &want)
		for address, one := range present.entries {
			loads[address] = one.load
		}
		return loads, want
	case "adapters":
		adapters, want := map[string]map[string]bool{}, map[string][]string{}
		unmarshal(t, value, &want)
		wanted := map[string]map[string]bool{}
		for address, has := range want {
			wanted[address] = set(has...)
		}
		for address, one := range present.entries {
			adapters[address] = one.adapters
		}
		return adapters, wanted
	case "tls_name":
		var told []*string
		unmarshal(t, value, &told)
		if found, ok := known.tlsName(*told[0]); ok {
			return &found, told[1]
		}
		return (*string)(nil), told[1]
	case "reports":
		return known.isWhatItSays(name(t, value), step.Fingerprint), step.Is
	case "checked":
		return known.isChecked(name(t, value)), step.Is
	case "asks":
		down, asked := set(step.Down...), map[string]bool{}
		for i := 0; i < turns; i++ {
			asked[known.teller(at, func(one string, _ time.Time) bool { return down[one] })] = true
		}
		return asked, names(t, value)
	case "time_to_look_s":
		since := 0.0
		unmarshal(t, value, &since)
		if step.Caller == "" {
			step.Caller = "good"
		}
		return known.isTimeToLook(seconds(since), step.Caller), step.Is
	default:
		t.Fatalf("no such step: %s", kind)
	}
	return nil, nil
}

func unmarshal(t *testing.T, text []byte, into interface{}) {
	t.Helper()
	if err := json.Unmarshal(text, into); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
}

func name(t *testing.T, text []byte) (found string) {
	unmarshal(t, text, &found)
	return found
}

func names(t *testing.T, text []byte) map[string]bool {
	found := []string{}
	unmarshal(t, text, &found)
	return set(found...)
}

func set(names ...string) map[string]bool {
	found := map[string]bool{}
	for _, one := range names {
		found[one] = true
	}
	return found
}

// firstKey says what a step is.
func firstKey(t *testing.T, step []byte) string {
	decoder := json.NewDecoder(bytes.NewReader(step))
	for {
		token, err := decoder.Token()
		if err != nil {
			t.Fatal(err)
		}
		if key, ok := token.(string); ok {
			return key
		}
	}
}

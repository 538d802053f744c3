package paceline

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"

	"github.com/paceline/paceline/clients/go/schedulerv1"
)

const secret = "a-token-of-many-bytes"

// authority issues certificates.
type authority struct {
	t           *testing.T
	key         *ecdsa.PrivateKey
	certificate *x509.Certificate
}

func newAuthority(t *testing.T) *authority {
	made := &authority{t: t}
	template := &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	made.key, made.certificate = made.signed(template)
	return made
}

func (a *authority) signed(template *x509.Certificate) (*ecdsa.PrivateKey, *x509.Certificate) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	template.SerialNumber = big.NewInt(1)
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	parent, signer := a.certificate, a.key
	if parent == nil {
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	if err != nil {
		a.t.Fatal(err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return key, certificate
}

func (a *authority) issued(name string) tls.Certificate {
	key, certificate := a.signed(&x509.Certificate{DNSNames: []string{name}})
	return tls.Certificate{Certificate: [][]byte{certificate.Raw}, PrivateKey: key}
}

func (a *authority) pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(a.certificate)
	return pool
}

// server is an option of servers whose clients have a certificate of the authority.
func (a *authority) server(certificate tls.Certificate) grpc.ServerOption {
	return grpc.Creds(credentials.NewTLS(&tls.Config{
		Certificates: []tls.Certificate{certificate}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: a.pool(),
	}))
}

// listening is an attacker's port without a certificate, and what came there.
func listening(t *testing.T) (address string, received func() []byte) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	var mutex sync.Mutex
	var found []byte
	go func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			connection.SetDeadline(time.Now().Add(100 * time.Millisecond))
			came, _ := io.ReadAll(connection)
			connection.Close()
			mutex.Lock()
			found = append(found, came...)
			mutex.Unlock()
		}
	}()
	return listener.Addr().String(), func() []byte {
		mutex.Lock()
		defer mutex.Unlock()
		return found
	}
}

func TestAPoisonedEntryGetsNoByteOfAToken(t *testing.T) {
	ours, foreign := newAuthority(t), newAuthority(t)
	given, honest, stranger, otherName, plain := &fake{}, &fake{}, &fake{}, &fake{}, &fake{}
	address, _ := serve(t, given, ours.server(ours.issued("localhost")))
	good, _ := serve(t, honest, ours.server(ours.issued("good.test")))
	ofStranger, _ := serve(t, stranger, ours.server(foreign.issued("good.test")))
	ofOtherName, _ := serve(t, otherName, ours.server(ours.issued("localhost")))
	ofPlain, _ := serve(t, plain)
	bare, received := listening(t)
	entries := []*schedulerv1.SchedulerEntry{
		entryOf(strings.Replace(ofPlain, "127.0.0.1", "localhost", 1), ""), // would be sent in the clear
	}
	for _, one := range []string{good, ofStranger, ofOtherName, ofPlain, bare} {
		entries = append(entries, entryOf(one, "good.test"))
	}
	given.list(entries...)
	for _, careless := range []bool{false, true} {
		config := &tls.Config{
			RootCAs: ours.pool(), ServerName: "localhost", Certificates: []tls.Certificate{ours.issued("a client")},
			InsecureSkipVerify: careless,
		}
		for _, use := range []DirectoryUse{DirectorySafe, DirectoryAny} {
			client := knowing(t, address, 5, WithTLS(config), WithToken(secret), WithDirectory(use))
			for i := 0; i < 24; i++ {
				if text := callWith(t, client, fmt.Sprint(i), i%2 == 0); text != whole {
					t.Fatal(text)
				}
			}
			client.Close()
		}
	}
	for number, one := range []*fake{given, honest, stranger, otherName, plain} {
		want := []string{}
		if number < 2 {
			want = append(want, "Bearer "+secret)
		}
		one.mutex.Lock()
		if !reflect.DeepEqual(set(want...), one.callers) {
			t.Fatal(number, one.callers)
		}
		one.mutex.Unlock()
	}
	// A TLS handshake, which nobody answers.
	if came := received(); len(came) == 0 || came[0] != 0x16 || bytes.Contains(came, []byte(secret)) {
		t.Fatalf("%q", came)
	}
}

func TestATokenStaysOnThisMachineWithoutTLS(t *testing.T) {
	given := &fake{}
	given.list(entryOf("10.0.0.2:1", ""), entryOf("unix:1", ""), entryOf("localhost:1", "name"))
	address, _ := serve(t, given)
	knowing(t, address, 0, WithToken(secret))
}

func TestAnEntryThatLiesAboutItsModelServesNobody(t *testing.T) {
	for _, unary := range []bool{false, true} {
		given, liar := &fake{}, &fake{model: "another", text: "a lie"}
		ofLiar, _ := serve(t, liar)
		given.list(entryOf(ofLiar, ""))
		address, _ := serve(t, given)
		client := knowing(t, address, 1)
		for i := 0; i < 24; i++ {
			if text := callWith(t, client, fmt.Sprint(i), unary); text != whole {
				t.Fatal(text)
			}
		}
		_, infos, requests := liar.seen()
		if len(client.Addresses()) != 1 || infos+len(requests) != 1 || unary && len(requests) != 0 {
			t.Fatal(client.Addresses(), infos, len(requests))
		}
	}
}

func TestWhatHasAnotherModelThanItsEntryIsUnavailable(t *testing.T) {
	given := &fake{}
	given.list(entryOf("127.0.0.1:1", ""))
	address, _ := serve(t, given)
	client := knowing(t, address, 1)
	for _, one := range []struct {
		address, model string
		is             bool
	}{{"127.0.0.1:1", "print", true}, {address, "whatever", true}, {"127.0.0.1:1", "another", false}} {
		started := &schedulerv1.Started{ModelFingerprint: []byte(one.model)}
		err := client.connections.checkStarted(one.address, &schedulerv1.GenerateResponse{
			Event: &schedulerv1.GenerateResponse_Started{Started: started},
		})
		var failure *Error
		if one.is != (err == nil) || !one.is && (!errors.As(err, &failure) || failure.Reason != otherModel ||
			failure.Code != codes.Unavailable || !failure.Retryable()) {
			t.Fatal(one, err)
		}
	}
	if found := client.Addresses(); len(found) != 1 {
		t.Fatal(found)
	}
}

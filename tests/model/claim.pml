/* One key, WORKERS workers: claim, lease, heartbeat, fence, redelivery, park, retry generation, settle and crash.

   The store's verbs are atomic steps under the names they have in celery_idem/stores/base.py; what they make of a record
   is core/decide.py, row by row. Between two verbs anything may happen: a worker is killed, the broker gives a message
   again while its copy still runs (then the running copy's ack is worth nothing, as on RabbitMQ), a lease lapses under
   its holder. A token is its worker's number: no worker has two. One that died comes back with nothing, and
   knows that it died; to the others its lease is live until it lapses.

   Broken on purpose, one -D at a time: STEAL NO_RIGHT NO_OVER NO_NOT_DUE NO_FENCE NO_SETTLED TELL_LATE ACK_FIRST */

#ifndef WORKERS
#define WORKERS 3
#endif
#ifndef MESSAGES
#define MESSAGES 1
#endif
#ifndef GENERATIONS
#define GENERATIONS 1
#endif
#ifndef CRASHES
#define CRASHES 0
#endif
#ifndef RESTORES
#define RESTORES 0
#endif
#ifndef LAPSES
#define LAPSES 0
#endif
#ifndef FAILURES
#define FAILURES 0
#endif
#define SURPLUS 2
#define PARKS 3                 /* counts end here: a copy parked more often is no further behind */
#define COPIES (MESSAGES * GENERATIONS * (PARKS + 1))
#define copy_of(m, g, p) (((m) * GENERATIONS + (g)) * (PARKS + 1) + (p))

mtype = { ABSENT, CLAIMED, COMPLETED, RELEASED };
mtype = { ACQUIRED, HELD, DONE, RIGHT, OVER, NOT_DUE };

/* the record; NOBODY is no worker, NONE no generation */
#define NOBODY WORKERS
#define NONE 255
mtype state = ABSENT;
byte token = NOBODY;
bool lapsed = false;
byte result = NONE;             /* which copy completed it */
typedef Note { byte over; byte successor; bool overdue; byte parked_generation; byte parked; byte right; bool right_lapsed; bool settled };
Note note[MESSAGES];            /* over and the generations are kept one higher, so that 0 is none */

/* the broker: copies on the queue, and which worker's copy it would give again */
byte queued[COPIES];
bool entry[WORKERS];

/* the workers */
mtype = { IDLE, BUSY, BODY, ENDING, CONTINUING };
mtype at[WORKERS] = IDLE;
byte message[WORKERS], generation[WORKERS], parked[WORKERS];
bool stopped[WORKERS];          /* the heartbeat heard that the claim is lost */

/* what may still go wrong, and what the world saw */
byte crashes = CRASHES, restores = RESTORES, lapses = LAPSES, failures = FAILURES;
bool told[MESSAGES];
bool ran[MESSAGES * GENERATIONS];
bool calm = true;               /* nobody was killed or stalled; that a copy comes twice is no excuse */

#define holds(w) (state == CLAIMED && token == (w))
#define alive(w) ((w) < WORKERS && at[w] != IDLE)
#define waits(m, g) (queued[copy_of(m, g, 0)] + queued[copy_of(m, g, 1)] + queued[copy_of(m, g, 2)] + queued[copy_of(m, g, 3)] > 0)
#if GENERATIONS > 1
#define on_the_queue(m) (waits(m, 0) || waits(m, 1))
#else
#define on_the_queue(m) waits(m, 0)
#endif
#define with(w, m) (at[w] != IDLE && message[w] == (m))
#if WORKERS > 2
#define given(w, m) (entry[w] && with(w, m))
#define kept_by_another(w, m) (((w) != 0 && given(0, m)) || ((w) != 1 && given(1, m)) || ((w) != 2 && given(2, m)))
#define busy_from(m, g) ((with(0, m) && generation[0] >= (g)) || (with(1, m) && generation[1] >= (g)) || (with(2, m) && generation[2] >= (g)))
#else
#define given(w, m) (entry[w] && with(w, m))
#define kept_by_another(w, m) (((w) != 0 && given(0, m)) || ((w) != 1 && given(1, m)))
#define busy_from(m, g) ((with(0, m) && generation[0] >= (g)) || (with(1, m) && generation[1] >= (g)))
#endif

/* promises, by the names they are reported under */
#define a_live_lease_is_not_taken(w) (!(state == CLAIMED && token != (w) && !lapsed))
#define a_live_right_is_not_taken(w, m) (note[m].right == NOBODY || note[m].right == (w) || note[m].right_lapsed)
#define a_result_never_changes (state != COMPLETED)
#define an_attempt_runs_once_when_all_is_calm(m, g) (!(calm && ran[(m) * GENERATIONS + (g)]))
#define no_continuation_after_settle(m) (!note[m].settled)
#define told_once_when_all_is_calm(m) (!(calm && told[m]))
#define acked_and_not_lost(w, m) (told[m] || on_the_queue(m) || kept_by_another(w, m))

/* --- decide.py ------------------------------------------------------------------------------------------------------ */

inline take(w, m, g) {
    assert(a_live_lease_is_not_taken(w));
    assert(a_result_never_changes);
    assert(an_attempt_runs_once_when_all_is_calm(m, g));
    ran[m * GENERATIONS + g] = true;
    state = CLAIMED; token = w; lapsed = false; result = NONE;
    if :: g > note[m].over -> note[m].over = g :: else fi;            /* over is at least g - 1, kept one higher */
    if :: note[m].successor <= g + 1 -> note[m].successor = 0; note[m].overdue = false :: else fi;
    answer = ACQUIRED
}

inline decide_claim(w, m, g) {
    if
    :: state == ABSENT -> take(w, m, g)
#ifndef NO_OVER
    :: state != ABSENT && g + 1 <= note[m].over -> answer = OVER
#endif
    :: else ->
        if
#ifdef STEAL
        :: state == CLAIMED -> take(w, m, g)
#else
        :: state == CLAIMED && !lapsed && token != w -> answer = HELD
        :: state == CLAIMED && (lapsed || token == w) -> take(w, m, g)
#endif
        :: state == RELEASED ->
            if
#ifndef NO_NOT_DUE
            :: note[m].successor > g + 1 && !note[m].overdue -> answer = NOT_DUE
#endif
            :: else -> take(w, m, g)
            fi
        :: state == COMPLETED ->
            if
            :: note[m].settled -> answer = DONE
#ifndef NO_RIGHT
            :: !note[m].settled && note[m].right != NOBODY && note[m].right != w && !note[m].right_lapsed -> answer = HELD
#endif
            :: else ->
                assert(a_live_right_is_not_taken(w, m));
                note[m].right = w; note[m].right_lapsed = false; answer = RIGHT
            fi
        fi
    fi
}

inline complete(w, m, g) {
    if
#ifdef NO_FENCE
    :: true ->
#else
    :: holds(w) ->
#endif
        assert(a_result_never_changes);
        state = COMPLETED; token = NOBODY; lapsed = false; result = copy_of(m, g, 0);
        note[m].right = w; note[m].right_lapsed = false; at[w] = CONTINUING; answer = DONE
#ifndef NO_FENCE
    :: else -> answer = HELD                                            /* lost: deliver anew */
#endif
    fi
}

inline release(w, m, next, ended) {
    if
    :: holds(w) ->
        state = RELEASED; token = NOBODY; lapsed = false;
        if :: next > 0 -> note[m].successor = next; note[m].overdue = false :: else fi;
        if :: ended > note[m].over -> note[m].over = ended :: else fi
    :: else
    fi
}

inline settle(m) {
#ifndef NO_SETTLED
    if :: state == COMPLETED -> note[m].settled = true; note[m].right = NOBODY; note[m].right_lapsed = false :: else fi
#else
    note[m].right = NOBODY
#endif
}

inline note_parked(m, g, p) {
    if
    :: state != ABSENT && (g + 1 > note[m].parked_generation || (g + 1 == note[m].parked_generation && p > note[m].parked)) ->
        note[m].parked_generation = g + 1; note[m].parked = p
    :: else
    fi
}

/* --- a worker ------------------------------------------------------------------------------------------------------- */

inline gone(w) {                /* whatever it had: the broker gives its copy again, if it was its copy's last */
    at[w] = IDLE; message[w] = 0; generation[w] = 0; parked[w] = 0; stopped[w] = false; entry[w] = false
}

inline killed(w, m, g, p) {
    crashes > 0;
    crashes--; calm = false;
    if :: entry[w] -> queued[copy_of(m, g, p)]++ :: else fi;
    gone(w)
}

inline ack(w, m) {
    assert(acked_and_not_lost(w, m));
    gone(w)
}

inline tell(m) {
    assert(told_once_when_all_is_calm(m));
    told[m] = true
}

proctype Worker(byte me) {
    byte m, g, p, c, noted;   /* message, generation and count of its copy */
    mtype answer;

idle:
end_idle:
    atomic {                    /* the broker gives a copy */
        if
        :: queued[0] > 0 -> c = 0
#if COPIES > 1
        :: queued[1] > 0 -> c = 1
        :: queued[2] > 0 -> c = 2
        :: queued[3] > 0 -> c = 3
#endif
#if COPIES > 4
        :: queued[4] > 0 -> c = 4
        :: queued[5] > 0 -> c = 5
        :: queued[6] > 0 -> c = 6
        :: queued[7] > 0 -> c = 7
#endif
#if COPIES > 8
        :: queued[8] > 0 -> c = 8
        :: queued[9] > 0 -> c = 9
        :: queued[10] > 0 -> c = 10
        :: queued[11] > 0 -> c = 11
        :: queued[12] > 0 -> c = 12
        :: queued[13] > 0 -> c = 13
        :: queued[14] > 0 -> c = 14
        :: queued[15] > 0 -> c = 15
#endif
        fi;
        queued[c]--; entry[me] = true; noted = 0; answer = 0;
        p = c % (PARKS + 1); g = (c / (PARKS + 1)) % GENERATIONS; m = c / ((PARKS + 1) * GENERATIONS);
        c = 0; message[me] = m; generation[me] = g; parked[me] = p; at[me] = BUSY
    }
claiming:
    atomic {
        if
        :: true -> decide_claim(me, m, g);
            stopped[me] = false;
            if
            :: answer == ACQUIRED -> at[me] = BODY; goto body
            :: answer == RIGHT -> at[me] = CONTINUING; goto publish
            :: answer == DONE || answer == OVER -> goto acking
            :: answer == HELD || answer == NOT_DUE -> goto held
            fi
        :: killed(me, m, g, p); goto idle
        fi
    }
held:                           /* waits for the record to change, then asks again; or is parked, or dropped */
    atomic {
        if
        :: answer == HELD && state == CLAIMED && lapsed -> goto claiming
        :: answer == HELD && state == COMPLETED -> goto claiming
        :: answer == HELD && state == RELEASED -> goto claiming
        :: answer == NOT_DUE && (state != RELEASED || note[m].overdue || note[m].successor <= g + 1) -> goto claiming
        :: true ->
            noted = (note[m].parked_generation == g + 1 -> note[m].parked : 0);
            if
            :: noted >= p + SURPLUS -> goto acking                      /* a later copy was itself delivered */
            :: else ->
                c = (noted > p -> noted : p) + 1;
                c = (c > PARKS -> PARKS : c);
#ifdef ACK_FIRST
                entry[me] = false; goto parking
#else
                queued[copy_of(m, g, c)]++; goto noting                 /* publish_parked, confirmed */
#endif
            fi
        :: killed(me, m, g, p); goto idle
        fi
    }
#ifdef ACK_FIRST
parking:
    atomic {
        if
        :: queued[copy_of(m, g, c)]++; goto noting
        :: killed(me, m, g, p); goto idle
        fi
    }
#endif
noting:
    atomic {
        if
        :: true -> note_parked(m, g, c); c = 0; goto acking
        :: killed(me, m, g, p); goto idle
        fi
    }
body:
    atomic {
        if
        :: stopped[me] -> stopped[me] = false; at[me] = BUSY; goto claiming        /* LeaseLost: deliver anew */
        :: at[me] = ENDING; goto completing                                        /* it returns a value */
#if GENERATIONS > 1
        :: g + 1 < GENERATIONS -> queued[copy_of(m, g + 1, 0)]++; at[me] = ENDING; goto retrying
#endif
        :: failures > 0 -> failures--; at[me] = ENDING;
#ifdef TELL_LATE
            goto ending
#else
            goto telling
#endif
        :: killed(me, m, g, p); goto idle
        fi
    }
completing:
    atomic {
        if
        :: true -> complete(me, m, g);
            if
            :: answer == DONE -> goto publish
            :: else -> at[me] = BUSY; goto claiming
            fi
        :: killed(me, m, g, p); goto idle
        fi
    }
publish:                        /* links, chain, chord part, result */
    atomic {
        if
        :: assert(no_continuation_after_settle(m)); tell(m)
        :: killed(me, m, g, p); goto idle
        fi
    }
    atomic {
        if
        :: true -> settle(m); goto acking
        :: killed(me, m, g, p); goto idle
        fi
    }
retrying:
    atomic {
        if
        :: true -> release(me, m, g + 2, 0); goto acking
        :: killed(me, m, g, p); goto idle
        fi
    }
#ifndef TELL_LATE
telling:                        /* errbacks and chord, before the claim is given back */
    atomic {
        if
        :: tell(m)
        :: killed(me, m, g, p); goto idle
        fi
    }
#endif
ending:
    atomic {
        if
        :: true -> release(me, m, 0, g + 1)
        :: killed(me, m, g, p); goto idle
        fi
    }
#ifdef TELL_LATE
    atomic {
        if
        :: tell(m)
        :: killed(me, m, g, p); goto idle
        fi
    }
#endif
acking:
    atomic {
        if
        :: ack(me, m); goto idle
        :: killed(me, m, g, p); goto idle
        fi
    }
}

/* --- what goes on beside ------------------------------------------------------------------------------------------- */

inline renew(w) {               /* the heartbeat: a lapsed lease nobody took is renewed, a lost one stops the body */
    at[w] == BODY && !stopped[w] && (!holds(w) || lapsed);
    if :: holds(w) -> lapsed = false :: else -> stopped[w] = true fi
}

inline restore(w) {             /* the broker gives again what it thinks was not acked */
    restores > 0 && entry[w];
    restores--; entry[w] = false; queued[copy_of(message[w], generation[w], parked[w])]++
}

inline lapse_right(m) {
    note[m].right != NOBODY && !note[m].right_lapsed && at[note[m].right] != CONTINUING;
    note[m].right_lapsed = true
}

inline pass_due(m) {            /* the retry of this message never came */
    note[m].successor > 0 && !note[m].overdue && !waits(m, 1) && !busy_from(m, note[m].successor - 1);
    note[m].overdue = true
}

proctype World() {
end:
    do
    :: atomic { renew(0) }
    :: atomic { renew(1) }
    :: atomic { restore(0) }
    :: atomic { restore(1) }
#if WORKERS > 2
    :: atomic { renew(2) }
    :: atomic { restore(2) }
#endif
    /* by the store's clock, leases lapse: of the dead always, of the living as often as allowed */
    :: atomic { state == CLAIMED && !lapsed && !(alive(token) && at[token] != BUSY) -> lapsed = true }
    :: atomic { state == CLAIMED && !lapsed && alive(token) && lapses > 0 -> lapses--; calm = false; lapsed = true }
    :: atomic { lapse_right(0) }
#if GENERATIONS > 1
    :: atomic { pass_due(0) }
#endif
#if MESSAGES > 1
    :: atomic { lapse_right(1) }
#if GENERATIONS > 1
    :: atomic { pass_due(1) }
#endif
#endif
    od
}

active proctype Judge() {       /* nothing is left to do: every message was told of */
end:
    timeout;
    assert(told[0]);
#if MESSAGES > 1
    assert(told[1])
#endif
}

init {
    atomic {
        note[0].right = NOBODY; queued[copy_of(0, 0, 0)] = 1;
#if MESSAGES > 1
        note[1].right = NOBODY; queued[copy_of(1, 0, 0)] = 1;
#endif
        run Worker(0); run Worker(1);
#if WORKERS > 2
        run Worker(2);
#endif
        run World()
    }
}

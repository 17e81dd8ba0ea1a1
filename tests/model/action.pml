/* One governed action, two workers, any number of deliveries of its steps: at most one mutation, ever.

   The verbs are atomic steps under the names they have in celery_idem/governed/store.py. That steps come in chains is left
   out: here any worker may take any step at any time, which is more than a chain, its copies and the sweep ever do. A
   worker may be killed before every step, its lease may lapse under it, the endpoint may be slow.

   Broken on purpose, one -D at a time: ANY_STATE TWO_STATEMENTS EXECUTE_FIRST RECOVER_TO_GATED FAIL_WHEN_KILLED */

#ifndef WORKERS
#define WORKERS 2
#endif
#ifndef CRASHES
#define CRASHES 2
#endif
#ifndef LAPSES
#define LAPSES 2
#endif
#define LOOKS 2                 /* max_observations */
#define NOBODY WORKERS

mtype = { PROPOSED, GATED, DISPATCHED, ACCEPTED, VERIFIED, COMPLETED, FAILED };
mtype state = PROPOSED;
byte attempt_count = 0, looks = 0;
bool contract = false, ambiguous = false;
byte lease_owner = NOBODY;
bool lapsed = false;
bool busy[WORKERS];

/* the endpoint, and what may still go wrong */
byte mutations = 0;
byte crashes = CRASHES, lapses = LAPSES;

#define mine(w) (lease_owner == (w) && !lapsed)
#define leased_to_me(w, wanted) (mine(w) && state == wanted)

/* promises, by the names they are reported under */
#define one_mutation_at_most (mutations == 0)
#define what_is_accepted_happened (mutations == 1)
#define what_failed_for_certain_never_happened (ambiguous || mutations == 0)
#define every_action_ends (state == COMPLETED || state == FAILED)

inline unlease() { lease_owner = NOBODY; lapsed = false }
inline killed(w) { crashes > 0; crashes--; busy[w] = false }

inline lease_next(w) {          /* never dispatched: its mutation may have happened */
#ifdef ANY_STATE
    lease_owner == NOBODY && (state == GATED || state == DISPATCHED || state == ACCEPTED || state == VERIFIED);
#else
    lease_owner == NOBODY && (state == GATED || state == ACCEPTED || state == VERIFIED);
#endif
    lease_owner = w; lapsed = false; busy[w] = true
}

inline lease_dispatched_observation(w) {
    lease_owner == NOBODY && state == DISPATCHED;
    lease_owner = w; lapsed = false; busy[w] = true
}

inline begin_owner_authorized_dispatch(w) {
    if
#ifdef ANY_STATE
    :: mine(w) && (state == GATED || state == DISPATCHED) ->
#else
    :: leased_to_me(w, GATED) && attempt_count == 0 && !contract ->
#endif
        state = DISPATCHED; attempt_count = 1; contract = true; ok = true
    :: else -> ok = false
    fi
}

inline execute() {              /* the endpoint does it */
    assert(one_mutation_at_most);
    mutations++
}

inline accept(w) {
    if
    :: leased_to_me(w, DISPATCHED) -> assert(what_is_accepted_happened); state = ACCEPTED; unlease()
    :: else
    fi
}

inline begin_dispatched_observation(w) {        /* journalled before it is made, and bounded */
    if
    :: leased_to_me(w, DISPATCHED) && looks < LOOKS -> looks++; ok = true
    :: leased_to_me(w, DISPATCHED) && looks == LOOKS -> ambiguous = true; state = FAILED; unlease(); ok = false
    :: else -> ok = false
    fi
}

inline defer_dispatched_observation(w) { if :: leased_to_me(w, DISPATCHED) -> unlease() :: else fi }

inline step(w, was, then) { if :: leased_to_me(w, was) -> state = then; unlease() :: else fi }

inline fail_attempt(w) {        /* refused before the dispatch: for certain */
    if
    :: leased_to_me(w, GATED) -> state = FAILED; unlease(); assert(what_failed_for_certain_never_happened)
    :: else
    fi
}

inline recover_expired_leases() {
    lease_owner != NOBODY && lapsed;
    unlease();
#ifdef RECOVER_TO_GATED
    if :: state == DISPATCHED -> state = GATED; attempt_count = 0; contract = false :: else fi
#endif
#ifdef FAIL_WHEN_KILLED
    if :: state == DISPATCHED -> state = FAILED; assert(what_failed_for_certain_never_happened) :: else fi
#endif
}

proctype Worker(byte me) {
    bool ok, seen;

idle:
    atomic { ok = false; seen = false };
end_idle:
    atomic {
        if
        :: lease_next(me);
            if
            :: state == GATED || state == DISPATCHED -> goto dispatch
            :: state == ACCEPTED -> goto verify
            :: state == VERIFIED -> goto complete
            fi
        :: lease_dispatched_observation(me); goto observe
        fi
    }
dispatch:
#ifdef EXECUTE_FIRST
    atomic {
        if
        :: leased_to_me(me, GATED) -> execute()
        :: !leased_to_me(me, GATED) -> busy[me] = false; goto idle
        :: killed(me); goto idle
        fi
    }
#endif
#ifdef TWO_STATEMENTS
    atomic {                    /* looks first, writes later */
        if
        :: leased_to_me(me, GATED) -> ok = true
        :: !leased_to_me(me, GATED) -> busy[me] = false; goto idle
        :: killed(me); goto idle
        fi
    }
    atomic {
        if
        :: state = DISPATCHED; attempt_count = 1; contract = true
        :: killed(me); goto idle
        fi
    }
#else
    atomic {
        if
        :: true -> begin_owner_authorized_dispatch(me);
            if
            :: ok
            :: !ok -> busy[me] = false; goto idle
            fi
        :: true -> fail_attempt(me); busy[me] = false; goto idle               /* GateRefused */
        :: killed(me); goto idle
        fi
    }
#endif
#ifndef EXECUTE_FIRST
executing:
    atomic {                    /* however long this takes, and whoever looks meanwhile */
        if
        :: true -> execute()
        :: busy[me] = false; goto idle                                  /* the endpoint was not reached */
        :: killed(me); goto idle
        fi
    }
#endif
    atomic {
        if
        :: true -> accept(me); busy[me] = false; goto idle
        :: busy[me] = false; goto idle                                  /* its answer was lost */
        :: killed(me); goto idle
        fi
    }
observe:
    atomic {
        if
        :: true -> begin_dispatched_observation(me);
            if
            :: ok
            :: !ok -> busy[me] = false; goto idle
            fi
        :: killed(me); goto idle
        fi
    }
    atomic {                    /* read-only; it may not show yet what is on its way */
        if
        :: seen = (mutations > 0)
        :: seen = false
        :: killed(me); goto idle
        fi
    }
    atomic {
        if
        :: seen -> accept(me); busy[me] = false; goto idle
        :: !seen -> defer_dispatched_observation(me); busy[me] = false; goto idle
        :: killed(me); goto idle
        fi
    }
verify:
    atomic {
        if
        :: true -> step(me, ACCEPTED, VERIFIED); busy[me] = false; goto idle
        :: killed(me); goto idle
        fi
    }
complete:
    atomic {
        if
        :: true -> step(me, VERIFIED, COMPLETED); busy[me] = false; goto idle
        :: killed(me); goto idle
        fi
    }
}

proctype World() {
end:
    do
    :: atomic { state == PROPOSED -> state = GATED }                    /* the owner approves */
    :: atomic { lease_owner != NOBODY && !lapsed && !busy[lease_owner] -> lapsed = true }
    :: atomic { lease_owner != NOBODY && !lapsed && lapses > 0 -> lapses--; lapsed = true }
    :: atomic { recover_expired_leases() }                              /* the sweep */
    od
}

active proctype Judge() {
end:
    timeout;
    assert(every_action_ends);
    assert(mutations <= 1);
    assert(state != COMPLETED || mutations == 1);
    assert(what_failed_for_certain_never_happened || state != FAILED)
}

init { atomic { run Worker(0); run Worker(1);
#if WORKERS > 2
    run Worker(2);
#endif
    run World() } }

//! Deliberate faults in the scripts, each of which the scenario of the rule that it breaks has to notice.

use std::collections::BTreeSet;

use crate::scenarios::{RawLock, SCENARIOS, SCRIPT_FAILED};
use crate::support::scripts::Sources;
use crate::support::server::{Server, connect};

/// A fault: a piece of one file that is replaced wherever it stands.
struct Mutant {
    /// What is wrong then.
    fault: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
    /// How often `from` stands in the file.
    times: usize,
    /// The scenario that must not hold any more.
    killed_by: &'static str,
}

const fn mutant(
    fault: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
    killed_by: &'static str,
) -> Mutant {
    Mutant { fault, file, from, to, times: 1, killed_by }
}

const ACQUIRE: &str = "acquire.lua";
const RENEW: &str = "renew.lua";
const RELEASE: &str = "release.lua";
const ABANDON: &str = "abandon.lua";
const EVICT: &str = "evict.lua";
const RECORD: &str = "lib/record.lua";
const GRANT: &str = "lib/grant.lua";
const DISPLACE: &str = "lib/displace.lua";

const MUTANTS: &[Mutant] = &[
    // The claim window and the bell.
    mutant(
        "no claim check",
        ACQUIRE,
        "if not free and claim and claim <= now then",
        "if false then",
        "a_dead_waiter_costs_one_claim_window",
    ),
    mutant(
        "passed over before its window ends",
        ACQUIRE,
        "if not free and claim and claim <= now then",
        "if not free and claim then",
        "a_dead_waiter_costs_one_claim_window",
    ),
    mutant(
        "passed over without a look at the bell",
        ACQUIRE,
        "free = client ~= me and ask('LINDEX', bell_of(client), 0) == holder .. ' ' .. string.format('%.0f', fence)",
        "free = client ~= me",
        "the_claim_window_is_decided_by_the_bell",
    ),
    mutant(
        "passed over for any ring",
        ACQUIRE,
        "ask('LINDEX', bell_of(client), 0) == holder .. ' ' .. string.format('%.0f', fence)",
        "ask('LINDEX', bell_of(client), 0)",
        "an_older_ring_does_not_pass_a_grant_over",
    ),
    mutant(
        "the caller's own grant is passed over",
        ACQUIRE,
        "free = client ~= me and ask(",
        "free = ask(",
        "a_client_does_not_pass_itself_over",
    ),
    mutant(
        "the bell of the displaced is not deleted",
        DISPLACE,
        "redis.call('LTRIM', bell_of(parts(holder)), 1, 0)",
        "redis.call('PERSIST', LOCK)",
        "a_displaced_grant_rings_no_more",
    ),
    mutant(
        "naming does nothing",
        RECORD,
        "  local unclaimed = claim ~= false\n  claimed()\n",
        "  local unclaimed = claim ~= false\n",
        "naming_is_claiming",
    ),
    mutant(
        "naming does not claim",
        RECORD,
        "    claim = false\n    ask('LTRIM'",
        "    ask('LTRIM'",
        "naming_is_claiming",
    ),
    mutant(
        "naming does not delete the bell",
        RECORD,
        "    ask('LTRIM', bell_of(parts(holder)), 1, 0)\n",
        "",
        "naming_is_claiming",
    ),
    mutant(
        "naming is not written down",
        RECORD,
        "return holder, fence, unclaimed",
        "return holder, fence, false",
        "naming_is_claiming",
    ),
    mutant(
        "nothing is named",
        RECORD,
        "return holder, fence, unclaimed",
        "return '', 0, unclaimed",
        "every_reply_names_the_callers_grant",
    ),
    mutant(
        "others' grants are named",
        RECORD,
        "if holder == '-' or parts(holder) ~= me then",
        "if holder == '-' then",
        "every_reply_names_the_callers_grant",
    ),
    mutant(
        "the claim window is longer than the lease",
        GRANT,
        "now + math.min(lease_ms * 1000, claim_us)",
        "now + claim_us",
        "a_claim_window_is_no_longer_than_the_lease",
    ),
    mutant(
        "a grant by ring has no claim window",
        GRANT,
        "    claim = now + math.min(lease_ms * 1000, claim_us)\n",
        "",
        "a_dead_waiter_costs_one_claim_window",
    ),
    mutant(
        "a grant in the reply has a claim window",
        GRANT,
        "  claim = false\n  if client ~= me then\n",
        "  claim = now + claim_us\n  if client ~= me then\n",
        "a_hand_over_within_a_client_rings_nobody",
    ),
    mutant(
        "a grant to the caller's client is rung",
        GRANT,
        "  if client ~= me then\n    claim",
        "  if true then\n    claim",
        "a_hand_over_within_a_client_rings_nobody",
    ),
    mutant(
        "the caller's bell is rung",
        GRANT,
        "local bell = bell_of(client)",
        "local bell = bell_of(me)",
        "a_release_rings_the_next_client",
    ),
    mutant(
        "the bell does not expire",
        GRANT,
        "    redis.call('PEXPIRE', bell, lease_ms)\n",
        "",
        "a_bell_expires",
    ),
    mutant(
        "an acquire does not claim its ring",
        ACQUIRE,
        "if claim then claimed() else redis.call('PERSIST', LOCK) end",
        "redis.call('PERSIST', LOCK)",
        "an_acquire_claims_its_ring",
    ),
    mutant(
        "a renewal does not claim its ring",
        RENEW,
        "if claim then claimed() else redis.call('PERSIST', LOCK) end",
        "redis.call('PERSIST', LOCK)",
        "a_renewal_claims",
    ),
    // Suspects.
    mutant(
        "a suspect is never cleared",
        RECORD,
        "if not suspected(client) then return false end",
        "do return false end",
        "a_suspect_that_comes_back_is_trusted_again",
    ),
    mutant(
        "nobody is ever suspected",
        DISPLACE,
        "if claim and not suspected(client) then",
        "if false then",
        "a_dead_process_costs_one_window_whatever_it_queued",
    ),
    mutant(
        "whoever lost a lease is suspected",
        DISPLACE,
        "if claim and not suspected(client) then",
        "if not suspected(client) then",
        "a_lapsed_holder_is_no_suspect",
    ),
    mutant(
        "suspects are never dropped",
        GRANT,
        "if #doomed == 1000 or not suspected(client) then",
        "if true then",
        "a_dead_process_costs_one_window_whatever_it_queued",
    ),
    mutant(
        "one ticket of a suspect is dropped, the others are granted",
        GRANT,
        "if #doomed == 1000 or not suspected(client) then",
        "if #doomed == 1 or not suspected(client) then",
        "a_dead_process_costs_one_window_whatever_it_queued",
    ),
    Mutant {
        fault: "suspects are dropped behind the living, too",
        file: GRANT,
        from: "      if client ~= me then ask('LLEN', bell_of(client)) end\n      break\n    end\n    doomed[#doomed + 1] = heads[i]\n",
        to: "      if client ~= me then ask('LLEN', bell_of(client)) end\n    else doomed[#doomed + 1] = heads[i] end\n",
        times: 1,
        killed_by: "suspects_behind_the_living_keep_their_places",
    },
    mutant(
        "a release does not pass suspects over",
        RELEASE,
        "  if suspects ~= '-' then drop(look(me)) end\n",
        "",
        "a_release_passes_suspects_over",
    ),
    mutant(
        "an abandon does not pass suspects over",
        ABANDON,
        "  drop(doomed)\n",
        "",
        "an_abandon_passes_suspects_over",
    ),
    mutant(
        "a client suspects itself",
        ACQUIRE,
        "  look_displaced()\n  trust(me)\n",
        "  look_displaced()\n",
        "a_client_does_not_suspect_itself",
    ),
    // Leases.
    mutant(
        "a renewal takes the lock back",
        RENEW,
        "if holder == ticket and fence == tonumber(ARGV[2]) then\n",
        "if tonumber(ARGV[2]) <= fence then\n  holder = ticket\n",
        "a_renewal_never_takes_the_lock_back",
    ),
    mutant(
        "a renewal does not look at the fence",
        RENEW,
        "if holder == ticket and fence == tonumber(ARGV[2]) then",
        "if holder == ticket then",
        "a_renewal_is_for_one_fence",
    ),
    mutant(
        "a renewal of a lapsed lease is refused",
        RENEW,
        "if holder == ticket and fence == tonumber(ARGV[2]) then",
        "if holder == ticket and fence == tonumber(ARGV[2]) and until_at > now then",
        "a_lapsed_lease_may_be_renewed_while_nobody_came",
    ),
    mutant(
        "a renewal renews nothing",
        RENEW,
        "  until_at = now + lease_ms * 1000\n",
        "",
        "a_lapsed_lease_may_be_renewed_while_nobody_came",
    ),
    mutant(
        "an acquire by the holder renews nothing",
        ACQUIRE,
        "  until_at = now + lease_ms * 1000\n",
        "",
        "an_acquire_by_the_holder_proves_the_grant_anew",
    ),
    mutant(
        "a release does not look at the fence",
        RELEASE,
        "if holder == ticket and fence == mine then",
        "if holder == ticket then",
        "a_release_is_for_one_fence",
    ),
    mutant(
        "a release does not look at the holder",
        RELEASE,
        "if holder == ticket and fence == mine then",
        "if fence == mine then",
        "a_release_is_by_the_holder",
    ),
    mutant(
        "a release of a lapsed lease is refused",
        RELEASE,
        "if holder == ticket and fence == mine then",
        "if holder == ticket and fence == mine and until_at > clock() then",
        "a_lapsed_lease_that_nobody_took_is_released",
    ),
    mutant(
        "a repeated release is called lost",
        RELEASE,
        "lost and 3 or 2",
        "3",
        "a_repeated_release_is_answered_already",
    ),
    mutant(
        "a lost fence is not remembered",
        DISPLACE,
        "  redis.call('ZADD', LOST, string.format('%.0f', fence), string.format('%.0f', fence))\n",
        "",
        "a_lost_lease_is_never_called_released",
    ),
    mutant(
        "the lost list is not asked",
        RELEASE,
        "local lost = ask('ZSCORE', LOST, ARGV[2]) or mine",
        "local lost = mine",
        "a_lost_lease_is_never_called_released",
    ),
    mutant(
        "the lost list is not cut",
        DISPLACE,
        "if forgotten > 0 then",
        "if false then",
        "forgotten_fences_count_as_lost",
    ),
    mutant(
        "birth is not raised over what is forgotten",
        DISPLACE,
        "    born = math.max(born, tonumber(cut[#cut]) + 1)\n",
        "",
        "forgotten_fences_count_as_lost",
    ),
    mutant(
        "the lost list does not expire",
        DISPLACE,
        "  redis.call('PEXPIRE', LOST, idle_ms)\n",
        "",
        "the_lost_list_expires",
    ),
    mutant(
        "a fence older than the record is not lost",
        RELEASE,
        " or mine < born",
        "",
        "a_lease_from_before_a_loss_of_data_is_lost",
    ),
    mutant(
        "a fence newer than the record is not lost",
        RELEASE,
        " or mine > fence",
        "",
        "a_lease_from_the_future_is_lost",
    ),
    mutant(
        "a release without a record is called released",
        RELEASE,
        "if not read() then return {3,",
        "if not read() then return {1,",
        "a_lease_from_before_a_loss_of_data_is_lost",
    ),
    mutant(
        "the caller's lease is granted, not the ticket's",
        GRANT,
        "local client, lease_ms = parts(ticket)\n",
        "local client = parts(ticket)\n  local _, lease_ms = parts(ARGV[1])\n",
        "a_ticket_is_granted_its_own_lease",
    ),
    mutant(
        "an eviction does not look at the fence",
        EVICT,
        " or fence ~= tonumber(ARGV[1])",
        "",
        "an_eviction_is_for_one_fence",
    ),
    mutant("an eviction is not remembered", EVICT, "displace(ARGV[3])\n", "", "an_eviction_is_for_one_fence"),
    mutant(
        "an abandon of a grant does not free",
        ABANDON,
        "if granted then\n",
        "if false then\n",
        "an_abandon_of_a_grant_passes_it_on",
    ),
    mutant(
        "an abandon leaves its ticket",
        ABANDON,
        "ask('ZREM', QUEUE, ticket)\n",
        "",
        "an_abandon_leaves_the_queue",
    ),
    mutant(
        "an abandon of the last ticket leaves a record for ever",
        ABANDON,
        "if granted or trusted or named or holder == '-' then",
        "if granted or trusted or named then",
        "an_abandon_of_the_last_ticket_lets_the_lock_expire",
    ),
    // Numbers.
    mutant(
        "fences are counted",
        GRANT,
        "local minted = math.max(fence + 1, now)",
        "local minted = fence + 1",
        "fences_ascend_over_a_lost_record",
    ),
    mutant(
        "fences are times",
        GRANT,
        "local minted = math.max(fence + 1, now)",
        "local minted = now",
        "fences_ascend_when_the_clock_goes_back",
    ),
    mutant(
        "the record's numbers are printed by tostring",
        RECORD,
        "string.format('%s %.0f %.0f %s %.0f %.0f %s %.0f',",
        "string.format('%s %s %s %s %s %s %s %s',",
        "numbers_are_exact",
    ),
    mutant(
        "the claim window's end is printed by tostring",
        RECORD,
        "claim and string.format('%.0f', claim) or '-'",
        "claim and tostring(claim) or '-'",
        "numbers_are_exact",
    ),
    mutant(
        "the ring's fence is printed by tostring",
        GRANT,
        "ticket .. ' ' .. string.format('%.0f', minted)",
        "ticket .. ' ' .. minted",
        "numbers_are_exact",
    ),
    mutant(
        "the lost fence is printed by tostring",
        DISPLACE,
        "string.format('%.0f', fence), string.format('%.0f', fence)",
        "tostring(fence), tostring(fence)",
        "numbers_are_exact",
    ),
    mutant(
        "the position is printed by tostring",
        ACQUIRE,
        "redis.call('ZADD', QUEUE, string.format('%.0f', at), ticket)",
        "redis.call('ZADD', QUEUE, tostring(at), ticket)",
        "numbers_are_exact",
    ),
    Mutant {
        fault: "a position is given twice",
        file: ACQUIRE,
        from: "math.max(pos + 1, now)",
        to: "math.max(pos, now)",
        times: 2,
        killed_by: "positions_ascend_within_a_microsecond",
    },
    Mutant {
        fault: "positions are counted",
        file: ACQUIRE,
        from: "math.max(pos + 1, now)",
        to: "pos + 1",
        times: 2,
        killed_by: "positions_ascend_over_a_lost_record",
    },
    mutant(
        "a grant does not raise the newest position",
        GRANT,
        "  pos = math.max(pos, position)\n",
        "",
        "positions_ascend_when_the_clock_goes_back",
    ),
    mutant(
        "a re-entry does not raise the newest position",
        ACQUIRE,
        "  pos = math.max(pos, at)\n",
        "",
        "positions_ascend_when_the_clock_goes_back",
    ),
    mutant(
        "a queue without a record is behind newcomers",
        ACQUIRE,
        "  if waiting > 0 then pos = ",
        "  if false then pos = ",
        "a_newcomer_is_behind_a_queue_that_lost_its_record",
    ),
    mutant(
        "the holder's place is not kept",
        GRANT,
        "holder, fence, until_at, place = ticket, minted, now + lease_ms * 1000, position",
        "holder, fence, until_at, place = ticket, minted, now + lease_ms * 1000, now",
        "a_grant_tells_the_position",
    ),
    // Order.
    mutant(
        "a newcomer overtakes",
        ACQUIRE,
        "if waiting == 0 then",
        "if true then",
        "a_newcomer_never_overtakes",
    ),
    mutant(
        "a poll overtakes",
        ACQUIRE,
        "if waiting == 0 then",
        "if waiting == 0 or queued then",
        "a_poll_serves_the_first",
    ),
    mutant(
        "a try barges",
        ACQUIRE,
        "if waiting == 0 then",
        "if waiting == 0 or not wait then",
        "a_try_never_barges",
    ),
    Mutant {
        fault: "a try queues",
        file: ACQUIRE,
        from: "if not wait then return refuse(3) end",
        to: "",
        times: 2,
        killed_by: "a_try_leaves_no_ticket",
    },
    Mutant {
        fault: "the queue has no limit",
        file: ACQUIRE,
        from: "if max_queue and waiting >= max_queue then return refuse(4) end",
        to: "",
        times: 2,
        killed_by: "a_full_queue_takes_nobody_in",
    },
    mutant(
        "the queue's limit counts those that are in it",
        ACQUIRE,
        "  if queued then\n    if changed",
        "  if queued then\n    if max_queue and waiting >= max_queue then return refuse(4) end\n    if changed",
        "a_full_queue_takes_nobody_in",
    ),
    mutant(
        "re-entry is at the back",
        ACQUIRE,
        "return answer_waiting(enqueue(position))",
        "return answer_waiting(enqueue())",
        "re_entry_keeps_the_old_position",
    ),
    mutant(
        "re-entry into a free lock is at the back",
        ACQUIRE,
        "if reentered then enqueue(position) end",
        "if reentered then enqueue() end",
        "re_entry_into_a_free_lock_keeps_the_old_position",
    ),
    // Time and loss.
    mutant(
        "a clock that went back is not noticed",
        RECORD,
        "  if ahead <= 0 then return false end",
        "  do return false end",
        "a_lease_ends_although_the_clock_went_back",
    ),
    mutant(
        "a clock that went back is not written down",
        ACQUIRE,
        "changed = correct_clock(now, regroup_us) or changed",
        "correct_clock(now, regroup_us)",
        "a_lease_ends_although_the_clock_went_back",
    ),
    mutant(
        "a claim window stays in the future",
        RECORD,
        "  if claim then claim = math.max(claim - ahead, 0) end\n",
        "",
        "a_claim_window_ends_although_the_clock_went_back",
    ),
    mutant(
        "nobody waits for those that come back after a loss of data",
        ACQUIRE,
        "    until_at, changed = now + regroup_us, true\n",
        "",
        "waiters_come_back_in_their_old_order_after_a_loss_of_data",
    ),
    mutant(
        "a queue without a record is no loss of data",
        ACQUIRE,
        "if position or waiting > 0 then",
        "if position then",
        "nobody_is_granted_at_once_when_the_record_was_lost",
    ),
    mutant(
        "a held lock expires",
        RECORD,
        "    redis.call('SET', LOCK, text)\n",
        "    redis.call('SET', LOCK, text, 'PX', idle_ms)\n",
        "a_held_lock_does_not_expire",
    ),
    mutant(
        "an idle lock does not expire",
        RECORD,
        "redis.call('SET', LOCK, text, 'PX', idle_ms)",
        "redis.call('SET', LOCK, text)",
        "an_idle_lock_expires",
    ),
    mutant(
        "a poll tells an older fence",
        ACQUIRE,
        "/ 1000)), fence, reentered",
        "/ 1000)), fence - 1, reentered",
        "a_poll_tells_the_newest_fence",
    ),
    mutant(
        "a poll is told to come when the lease ends, not the claim window",
        ACQUIRE,
        "(claim and claim > now) and claim or until_at",
        "until_at",
        "a_dead_waiter_costs_one_claim_window",
    ),
    // A full server, and values of others.
    mutant(
        "a renewal grows first",
        RENEW,
        "if claim then claimed() else redis.call('PERSIST', LOCK) end",
        "if claim then claimed() end",
        "holders_and_waiters_go_on_without_memory",
    ),
    mutant(
        "the holder's acquire grows first",
        ACQUIRE,
        "if claim then claimed() else redis.call('PERSIST', LOCK) end",
        "if claim then claimed() end",
        "holders_and_waiters_go_on_without_memory",
    ),
    mutant(
        "displacing grows first",
        DISPLACE,
        "  redis.call('LTRIM', bell_of(parts(holder)), 1, 0)\n  redis.call('ZADD', LOST, string.format('%.0f', fence), string.format('%.0f', fence))\n",
        "  redis.call('ZADD', LOST, string.format('%.0f', fence), string.format('%.0f', fence))\n  redis.call('LTRIM', bell_of(parts(holder)), 1, 0)\n",
        "holders_and_waiters_go_on_without_memory",
    ),
    mutant(
        "a poll of a suspect grows first",
        ACQUIRE,
        "    if changed then redis.call('PERSIST', LOCK) end\n",
        "",
        "a_suspect_comes_back_without_memory",
    ),
    mutant(
        "a newcomer whose client's ring is foreign has queued",
        ACQUIRE,
        "  look_named(me)\n",
        "",
        "a_foreign_bell_stops_a_call_that_would_name_before_it_changes_anything",
    ),
    mutant(
        "an abandon whose client's ring is foreign has left the queue",
        ABANDON,
        "if known then look_named(me) end\n",
        "",
        "a_foreign_bell_stops_a_call_that_would_name_before_it_changes_anything",
    ),
    Mutant {
        fault: "a release that cannot ring has changed the queue",
        file: GRANT,
        from: "      -- Only popping the head came before, so putting it back undoes the whole call.\n      redis.call('ZADD', QUEUE, string.format('%.0f', position), ticket)\n",
        to: "",
        times: 1,
        killed_by: "a_foreign_bell_stops_a_release_before_it_changes_anything",
    },
];

impl Mutant {
    /// The scripts with this fault.
    fn sources(&self) -> Sources {
        Sources::on_virtual_time().with(self.file, self.from, self.to, self.times)
    }
}

/// The scripts with the fault of that name.
pub(crate) fn sources(fault: &str) -> Sources {
    MUTANTS.iter().find(|mutant| mutant.fault == fault).expect("the fault's name").sources()
}

#[test]
fn every_fault_is_noticed_by_the_scenario_of_its_rule() {
    let server = Server::start();
    let mut connection = connect(&server.unix_url()).expect("a connection to the test's server");
    let mut survivors = Vec::new();
    for mutant in MUTANTS {
        let (_, scenario) =
            SCENARIOS.iter().find(|(name, _)| *name == mutant.killed_by).expect("the scenario's name");
        let scripts = mutant.sources().load(&mut connection);
        match scenario(&mut RawLock::new(&mut connection, &scripts)) {
            Ok(()) => survivors.push(format!("{}: {} holds", mutant.fault, mutant.killed_by)),
            // A script that Lua stops proves nothing; one that is refused for want of memory, or that no longer knows
            // its own record, does.
            Err(why)
                if why.starts_with(SCRIPT_FAILED) && !why.contains("OOM") && !why.contains("FOREIGN") =>
            {
                survivors.push(format!("{}: {why}", mutant.fault));
            }
            Err(why) => println!("{}: {}: {why}", mutant.fault, mutant.killed_by),
        }
    }
    println!("{} faults", MUTANTS.len());
    assert!(survivors.is_empty(), "{} of {}:\n{}", survivors.len(), MUTANTS.len(), survivors.join("\n"));
}

#[test]
fn every_fault_has_a_name_of_its_own() {
    let names: BTreeSet<_> = MUTANTS.iter().map(|mutant| mutant.fault).collect();
    assert_eq!(names.len(), MUTANTS.len());
}

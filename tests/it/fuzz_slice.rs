//! A slice of the fuzzing in `fuzz/`: arbitrary bytes, and bytes that are nearly right.

use proptest::prelude::*;
use redis_fifo_lock::redis::Value;

#[path = "../../fuzz/properties.rs"]
mod properties;

/// A ticket, or nearly one.
fn ticket() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => r"[a-c-]{1,3}\.[0-9]{1,3}\.[0-9]{1,4}",
        1 => r"[a-z_.-]{0,6}\.?[0-9]{0,18}\.?[0-9]{0,18}",
        1 => Just(String::new()),
        1 => Just("-".to_owned()),
    ]
}

/// A number, or nearly one: small ones, those around 2^53 and 2^64, and no number.
fn number() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => (0_u64..100).prop_map(|n| n.to_string()),
        1 => (-3_i64..3).prop_map(|n| (n + (1 << 53)).to_string()),
        1 => any::<i64>().prop_map(|n| n.to_string()),
        1 => "[0-9+-]{0,20}",
        1 => Just("-".to_owned()),
    ]
}

fn item() -> impl Strategy<Value = Value> {
    prop_oneof![
        6 => (0_i64..10).prop_map(Value::Int),
        1 => any::<i64>().prop_map(Value::Int),
        1 => (-3_i64..3).prop_map(|n| Value::Int(n + (1 << 53))),
        4 => ticket().prop_map(|text| Value::BulkString(text.into_bytes())),
        1 => number().prop_map(|text| Value::BulkString(text.into_bytes())),
        1 => record().prop_map(|text| Value::BulkString(text.into_bytes())),
        1 => ticket().prop_map(Value::SimpleString),
        1 => any::<Vec<u8>>().prop_map(Value::BulkString),
        1 => Just(Value::Nil),
        1 => Just(Value::Okay),
        1 => Just(Value::Boolean(true)),
        1 => Just(Value::Double(1.0)),
        1 => Just(Value::Array(vec![Value::Int(1)])),
    ]
}

/// A reply whose items have the right kinds, mostly.
fn reply() -> impl Strategy<Value = Value> {
    let small = || (0_i64..10).prop_map(Value::Int);
    let text = || ticket().prop_map(|text| Value::BulkString(text.into_bytes()));
    let waiting = (small(), small(), small(), small(), 0_i64..3, text(), small()).prop_map(
        |(position, ahead, ms, newest, reentered, next, fence)| {
            Value::Array(vec![Value::Int(2), position, ahead, ms, newest, Value::Int(reentered), next, fence])
        },
    );
    let next = (0_i64..6, text(), small())
        .prop_map(|(code, next, fence)| Value::Array(vec![Value::Int(code), next, fence]));
    let granted = (0_i64..6, small(), small())
        .prop_map(|(code, fence, position)| Value::Array(vec![Value::Int(code), fence, position]));
    let inspected = (small(), record(), small(), prop::collection::vec((ticket(), number()), 0..3)).prop_map(
        |(now, record, waiting, queue)| {
            let mut items = vec![now, Value::BulkString(record.into_bytes()), waiting];
            for (ticket, position) in queue {
                items.push(Value::BulkString(ticket.into_bytes()));
                items.push(Value::BulkString(position.into_bytes()));
            }
            Value::Array(items)
        },
    );
    prop_oneof![
        waiting,
        next,
        granted,
        inspected,
        prop::collection::vec(item(), 0..10).prop_map(Value::Array),
        item(),
    ]
}

/// A record, or nearly one.
fn record() -> impl Strategy<Value = String> {
    let fields = (ticket(), number(), number(), number(), number(), number(), "[a-c,-]{0,5}", number());
    let spelled = fields.prop_map(|(holder, fence, until, claim, pos, born, suspects, place)| {
        format!("{holder} {fence} {until} {claim} {pos} {born} {suspects} {place}")
    });
    prop_oneof![8 => spelled, 1 => "[a-z0-9. -]{0,40}", 1 => Just(String::new())]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_record_says_what_its_text_spells(near in record(), far in any::<String>()) {
        for text in [near, far] {
            properties::record(&text);
        }
    }

    #[test]
    fn a_ticket_says_what_its_text_spells(near in ticket(), far in any::<String>()) {
        for text in [near, far] {
            properties::ticket(&text);
        }
    }

    #[test]
    fn a_ring_says_what_its_bytes_spell(ticket in ticket(), fence in number(), far in any::<Vec<u8>>()) {
        properties::ring(format!("{ticket} {fence}").as_bytes());
        properties::ring(&far);
    }

    #[test]
    fn a_reply_says_what_its_items_spell(which in any::<u8>(), value in reply()) {
        properties::reply(which, &value);
    }

    #[test]
    fn bytes_off_the_wire_are_a_reply_or_an_error(
        which in any::<u8>(),
        bytes in any::<Vec<u8>>(),
        near in r"\*[0-9]{1,2}\r\n(:-?[0-9]{1,17}\r\n|\$[0-9]{1,2}\r\n[a-z0-9.]{0,9}\r\n){0,9}",
    ) {
        properties::wire(which, &bytes);
        properties::wire(which, near.as_bytes());
    }
}

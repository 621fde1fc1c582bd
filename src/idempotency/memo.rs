//! `Memo`: what whoever ended a job left for those who ask later.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::Error;

/// What was left when a job ended: JSON, or nothing.
///
/// # Examples
///
/// ```
/// use redis_fifo_lock::LockClient;
/// use redis_fifo_lock::idempotency::{Begin, IdempotencyKey};
///
/// let jobs = LockClient::memory().idempotency().build()?;
/// let key = IdempotencyKey::new("mail", &serde_json::json!({"to": 7}))?;
/// let Begin::Begun(claim) = jobs.begin(&key)? else { panic!("nobody did it before") };
/// claim.complete(&("sent", 250))?;
///
/// let Begin::Done(memo) = jobs.begin(&key)? else { panic!("it is done") };
/// assert_eq!(memo.get::<(String, u32)>()?, Some(("sent".into(), 250)));
/// assert_eq!(memo.json(), Some(r#"["sent",250]"#));
/// # Ok::<(), redis_fifo_lock::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memo {
    json: Option<Box<str>>,
}

impl Memo {
    pub(super) fn new(json: Option<Box<str>>) -> Memo {
        Memo { json }
    }

    /// Writes `value` as a memo.
    pub(super) fn of(value: &(impl Serialize + ?Sized)) -> Result<Memo, Error> {
        match serde_json::to_string(value) {
            Ok(json) => Ok(Memo::new(Some(json.into()))),
            Err(why) => Err(Error::Config(format!("the memo does not serialise: {why}"))),
        }
    }

    pub(super) fn into_json(self) -> Option<Box<str>> {
        self.json
    }

    /// The memo as JSON; `None` if there is none, which is not the same as a memo of `null`.
    #[must_use]
    pub fn json(&self) -> Option<&str> {
        self.json.as_deref()
    }

    /// The memo as a `T`; `None` if there is none.
    ///
    /// # Errors
    ///
    /// [`Error::Protocol`] if the memo is no `T`: it was left by another version of the job.
    pub fn get<T: DeserializeOwned>(&self) -> Result<Option<T>, Error> {
        let parse = |json: &str| {
            serde_json::from_str(json).map_err(|why| {
                let wanted = std::any::type_name::<T>();
                Error::Protocol(format!("the memo is no {wanted}: {why}"))
            })
        };
        self.json.as_deref().map(parse).transpose()
    }
}

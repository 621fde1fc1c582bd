//! A short list without a heap: what a state of the model is made of, so that copying one is cheap.

/// Up to `N` items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Few<T, const N: usize> {
    len: u8,
    items: [T; N],
}

impl<T: Copy + Default, const N: usize> Default for Few<T, N> {
    fn default() -> Few<T, N> {
        Few { len: 0, items: [T::default(); N] }
    }
}

impl<T: Copy + Default, const N: usize> Few<T, N> {
    pub(crate) fn len(&self) -> usize {
        self.len.into()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.len() == N
    }

    /// Adds one at the end. A list that would grow past its bound is a fault of the model.
    pub(crate) fn push(&mut self, item: T) {
        assert!(!self.is_full(), "the model keeps at most {N} of these");
        self.items[self.len()] = item;
        self.len += 1;
    }

    /// Takes one out, keeping the order of the others.
    pub(crate) fn remove(&mut self, index: usize) -> T {
        let item = self[index];
        self.items.copy_within(index + 1..self.len.into(), index);
        self.len -= 1;
        self.items[self.len()] = T::default();
        item
    }

    pub(crate) fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) {
        for index in (0..self.len()).rev() {
            if !keep(&self[index]) {
                self.remove(index);
            }
        }
    }

    /// Makes it `len` long, filled up with defaults.
    pub(crate) fn resize(&mut self, len: usize) {
        while self.len() > len {
            self.remove(self.len() - 1);
        }
        while self.len() < len {
            self.push(T::default());
        }
    }
}

impl<T, const N: usize> std::ops::Deref for Few<T, N> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.items[..usize::from(self.len)]
    }
}

impl<T, const N: usize> std::ops::DerefMut for Few<T, N> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.items[..usize::from(self.len)]
    }
}

// The admin token. It is kept only in this tab, as long as the tab is open.

const KEY = "twinfang.admin_token";

export const readToken = () => sessionStorage.getItem(KEY) ?? "";
export const keepToken = (token) => sessionStorage.setItem(KEY, token);
export const forgetToken = () => sessionStorage.removeItem(KEY);
